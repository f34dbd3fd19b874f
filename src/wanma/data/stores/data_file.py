"""Listed files as formats read them: address, size, version, and bytes once they are opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wanma.data.stores.byte_source import ByteSource
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.remote_file import open_file
from wanma.job.url_credentials import redact_credentials


class FileOpener(Protocol):
    """Opener of listed files, such as a node cache."""

    def open(self, file: StoredFile) -> ByteSource:
        """Return the bytes of a listed file.

        Raises:
            WanmaError: the file is gone, has changed, or cannot be read.
        """


@dataclass(frozen=True)
class OpenableFile:
    """Listed file that can be opened; attributes and methods as of `wanma.data.formats.format.DataFile`.

    A local file is mapped into memory. A remote one is read by ranges, through `opener` if there is one.
    """

    stored: StoredFile
    opener: FileOpener | None = None
    """Opener of the file, such as a node cache; None: its store."""

    @property
    def url(self) -> str:
        """Address, for messages and as identity; without credentials."""
        return redact_credentials(self.stored.url)

    @property
    def size(self) -> int:
        """Size in bytes, as stored."""
        return self.stored.size

    @property
    def version(self) -> str:
        """Version of the content, see `StoredFile.version`."""
        return self.stored.version

    def open(self) -> ByteSource:
        """Open the file.

        Raises:
            WanmaError: the file is gone, has changed, or cannot be read.
        """
        return open_file(self.stored) if self.opener is None else self.opener.open(self.stored)
