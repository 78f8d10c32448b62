"""The folder in memory through which a server's engine exchanges KV with engines of other servers."""

from __future__ import annotations

import os
from pathlib import Path

from dora.engine.backends.server_plugins import dora_kv_files as kv_files
from dora.engine.kv_transfer.handoff import ExportedKV, TransferError
from dora.errors import ConfigError

KV_CONNECTORS = ("files", "nixl")  # values of the option `kv_connector`
LEASE_S = 60.0  # KV that no server has imported by then is removed, and its request prefilled


class KVExchange:
    """KV of one server in `folder`. Its `num_workers` workers write blocks of `layout`; see `KVOrigin`.

    Servers that read each other's KV themselves write tickets in place of blocks. `address` is then where
    those of other machines reach this one; None: they cannot.
    """

    def __init__(
        self, folder: Path, layout: tuple[str, ...], num_workers: int, address: str | None = None
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.layout, self._num_workers, self.address = folder, layout, num_workers, address
        self.has_tickets = layout[0] == kv_files.BY_TICKET

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

    def exported(self, server_id: str) -> ExportedKV:
        """The KV of a request that this server has exported. Raises TransferError if it has not."""
        folder, ticket = self.folder_of(server_id), b""
        if self.has_tickets:
            try:
                ticket = (folder / kv_files.TICKET_FILE).read_bytes()
            except OSError as error:
                raise TransferError(f"there is no ticket: {error}") from error
        return ExportedKV(folder, 0, ticket)

    def check(self, kv: ExportedKV, weight_digest: str, num_tokens: int) -> ExportedKV:
        """The KV with its size. Raises TransferError unless it is of at least this many tokens.

        Headers of files name the weights, which must be these. A ticket does not: the engines compare those
        that they have loaded (`KVFormat`).
        """
        try:
            if self.has_tickets:
                ticket = kv_files.parse_ticket(kv.ticket)
                num_exported, num_bytes = ticket.num_tokens, ticket.num_bytes
            else:
                headers = kv_files.read_headers(kv.folder, self._num_workers)
                origin = kv_files.KVOrigin(weight_digest, self.layout)
                if other := [header.origin for header in headers if header.origin != origin]:
                    raise TransferError(f"the KV is of {other[0]}, and this engine has {origin}")
                num_exported = min(header.num_tokens for header in headers)
                num_bytes = sum(header.num_bytes for header in headers)
        except kv_files.KVFileError as error:
            raise TransferError(str(error)) from error
        if num_exported < num_tokens:
            raise TransferError(f"the KV is of {num_exported} tokens; {num_tokens} are needed")
        return kv._replace(num_bytes=num_bytes)

    def claim(self, kv: ExportedKV) -> Path:
        """Move KV of another engine here: that engine's folder goes with it.

        A ticket, which may come from another machine, is written here again.
        """
        claimed = self.folder / f"{kv.folder.name}.in"
        try:
            if not self.has_tickets:
                return kv.folder.rename(claimed)
            claimed.mkdir(mode=0o700)
            (claimed / kv_files.TICKET_FILE).write_bytes(kv.ticket)
        except OSError:  # its engine has just ended, or there is no memory: the server prefills
            pass
        return claimed

    def remove(self, folder: Path) -> None:
        kv_files.remove(folder)


def check_kv_connector(connector: object, python: object) -> None:
    """Raises ConfigError unless servers can be started with this connector."""
    if connector not in KV_CONNECTORS:
        raise ConfigError(f"kv_connector = {connector!r}: must be one of {', '.join(KV_CONNECTORS)}")
    if connector != "files" and python is None:
        raise ConfigError(
            f"kv_connector = {connector!r}: with url, start the server with that connector, and remove "
            "kv_connector"
        )


def nixl_environment(host: str | None, device: str) -> dict[str, str]:
    """Variables of a server whose memory others read over NIXL: without `host`, of this machine only."""
    ucx = {} if host is not None else {"UCX_NET_DEVICES": "lo"}
    if device == "cpu":
        ucx["UCX_TLS"] = "tcp,self"  # through shared memory a read from an exited process may not end
    return {key: value for key, value in ucx.items() if key not in os.environ}
