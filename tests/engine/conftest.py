# SPDX-License-Identifier: Apache-2.0
"""What all tests of the engine share."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Tests kill processes, not machines: what was written is seen without fsync.

    Thousands of transactions would otherwise wait minutes for the disk.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield
