"""The same run in several processes: how they are started, what they agree on, and who holds what of the model.

Each process runs Lightning's loop by itself (see `strategy`); what they share goes through torch.distributed, at the
few places where `processes` and `replicas` are called.
"""
