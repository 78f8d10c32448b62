"""The folder in memory through which a server's engine exchanges KV with engines of other servers."""

from __future__ import annotations

from pathlib import Path

from dora.engine.backends.server_plugins import dora_kv_files as kv_files
from dora.engine.kv_transfer.handoff import TransferError
from dora.engine.kv_transfer.server_migrator import ExportedKV

LEASE_S = 60.0  # KV that no server has imported by then is removed, and its request prefilled


class KVExchange:
    """KV of one server in `folder`. Its `num_workers` workers write blocks of `layout`; see `KVOrigin`."""

    def __init__(self, folder: Path, layout: tuple[str, ...], num_workers: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.layout, self._num_workers = folder, layout, num_workers

    def folder_of(self, server_id: str) -> Path:
        """Where the server writes the KV of a request, by its id there."""
        return self.folder / server_id

    def order_export(self, server_id: str) -> bool:
        """Let the server halt a request and export its KV. False if there is no memory for the order."""
        kv_files.remove_expired(self.folder, LEASE_S)
        try:
            kv_files.order_export(self.folder_of(server_id))
        except OSError:
            return False
        return True

    def is_awaited(self, server_id: str) -> bool:
        """Whether an export is ordered and not whole yet."""
        return kv_files.part_folder(self.folder_of(server_id)).is_dir()

    def check(self, folder: Path, weight_digest: str, num_tokens: int) -> ExportedKV:
        """Raises TransferError unless `folder` has the KV of at least this many tokens, by these weights."""
        origin = kv_files.KVOrigin(weight_digest, self.layout)
        try:
            headers = kv_files.read_headers(folder, self._num_workers)
        except kv_files.KVFileError as error:
            raise TransferError(str(error)) from error
        for header in headers:
            if header.origin != origin:
                raise TransferError(f"the KV is of {header.origin}, and this engine has {origin}")
            if header.num_tokens < num_tokens:
                raise TransferError(f"the KV is of {header.num_tokens} tokens; {num_tokens} are needed")
        return ExportedKV(folder, sum(header.num_bytes for header in headers))

    def claim(self, kv: ExportedKV) -> Path:
        """Move KV of another engine here: that engine's folder goes with it."""
        claimed = self.folder / f"{kv.folder.name}.in"
        try:
            return kv.folder.rename(claimed)
        except OSError:  # its engine has just ended: the server prefills
            return claimed

    def remove(self, folder: Path) -> None:
        kv_files.remove(folder)
