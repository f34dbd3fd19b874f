"""Adapter of causal transformers models: module replacement, probe, parallel spec, weights.

Its first import is that of transformers, which tries libraries such as torchao. Their warnings are no part of
a command's output.
"""

import logging
import warnings


def _import_transformers() -> None:
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers.modeling_utils  # noqa: F401
    finally:
        logging.disable(disabled_level)


_import_transformers()
