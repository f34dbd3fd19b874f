"""Read by every Python process of a command under test; see `support.injection`."""

import os

if "WANMA_TEST_FAULTS" in os.environ:
    from support.injection import install

    install()
