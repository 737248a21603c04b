from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes, then four."""
    processes = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()
