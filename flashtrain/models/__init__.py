"""Models as their papers have them: plain `nn.Module`s, the loss of the vocabulary head, sampling and FLOP counts.

Nothing here knows Lightning, parallelism or kernels. Attention comes in as one callable.
"""
