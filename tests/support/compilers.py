"""A machine without a C++ compiler."""

from __future__ import annotations

from wanma.hardware.native import native_library


def there_is_none() -> None:
    """Nothing of our own can be compiled, whatever is installed."""
    native_library.find_cpp_compiler = lambda: None  # type: ignore[attr-defined]  # a test's
