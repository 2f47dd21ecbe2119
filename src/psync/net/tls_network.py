"""A network whose connections have TLS, over any other network."""

from __future__ import annotations

import asyncio

from psync.cluster import split_address
from psync.errors import ConfigurationError
from psync.net.tls import TlsChannel
from psync.net.tls_config import HOW_TO_MAKE_THEM, Tls
from psync.net.transport import Factory, Listener, Network

UNIX_NAME = "localhost"
"""The name that the certificate of a task must bear that listens on a Unix socket."""


class TlsNetwork:
    """TLS on every connection of ``network``, Unix sockets included.

    Args:
        network: What the connections are made of.
        tls: Certificates of this task, and whom it trusts.
    """

    def __init__(self, network: Network, tls: Tls) -> None:
        self._network = network
        self._tls = tls

    async def connect(
        self, address: str, factory: Factory
    ) -> tuple[asyncio.BaseTransport, asyncio.BufferedProtocol]:
        """Open a connection; see ``transport.Network``. TLS itself may still be on its way.

        If it fails, the protocol's ``connection_lost`` gets an AuthenticationError, for good, or
        a ConnectionLost.
        """
        host, port = split_address(address)
        name = UNIX_NAME if port is None else host.partition("%")[0]

        def layered() -> asyncio.BufferedProtocol:
            try:
                return TlsChannel(factory(), self._tls.client, address, server_name=name)
            except ValueError as exc:  # of ssl: a name that no certificate can bear
                raise ConfigurationError(f"address {address!r}: {exc}") from exc

        channel: TlsChannel
        _, channel = await self._network.connect(address, layered)  # type: ignore[assignment]
        return channel, channel.above

    async def listen(self, address: str, factory: Factory) -> Listener:
        """Listen; see ``transport.Network``.

        Raises:
            ConfigurationError: This task has no certificate.
        """
        context = self._tls.server
        if context is None:
            raise ConfigurationError(
                f"a task that listens ({address}) with TLS needs a certificate of its own: "
                "PSYNC_TLS_CERT_FILE and PSYNC_TLS_KEY_FILE are not set",
                hint=HOW_TO_MAKE_THEM,
            )
        binding = self._tls.binding
        return await self._network.listen(
            address, lambda: TlsChannel(factory(), context, binding=binding)
        )
