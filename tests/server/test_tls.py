"""The TLS layer against the standard library's client, and contexts with certificates."""

from __future__ import annotations

import random
import ssl
import tracemalloc
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from OpenSSL import SSL

from nsparq.errors import StartError
from nsparq.server.tls import TlsLayer, build_context
from nsparq.transport.deflate import DeflateLayer
from nsparq.transport.layers import MAX_PIECE, LayerError, LayerStack
from nsparq.transport.snappy import SnappyLayer
from tests.support.certificates import Pair, certificates, issue
from tests.support.memory import freed_without_collecting

VERSIONS = {
    "tls1.0": ssl.TLSVersion.TLSv1,
    "tls1.1": ssl.TLSVersion.TLSv1_1,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}


def server_context(pair: Pair | None = None, **rules: str) -> SSL.Context:
    pair = pair or certificates().server
    return build_context(str(pair.cert), str(pair.key), **rules)


class Client:
    """The standard library's TLS, in memory."""

    def __init__(
        self,
        pair: Pair | None = None,
        *,
        version: str = "",
        ciphers: str = "",
        ca: Pair | None = None,
        protocols: tuple[str, ...] = (),
    ) -> None:
        context = certificates().client_context(pair)
        if ca is not None:
            context.load_verify_locations(ca.cert)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        if version:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = VERSIONS[version]
            context.set_ciphers("ALL:@SECLEVEL=0")
        if ciphers:
            context.set_ciphers(ciphers)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    def shake_hands(self, layer: TlsLayer, step: int = 1 << 20) -> None:
        """Exchange bytes until both sides have nothing to send."""
        for _ in range(5):
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            spoken = self.outgoing.read()
            for start in range(0, len(spoken), step):
                assert list(layer.receive(spoken[start : start + step])) == []
            self.incoming.write(layer.take_output())

    def encrypt(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self.outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        self.incoming.write(data)
        found = []
        try:
            while piece := self.tls.read(1 << 16):
                found.append(piece)
        except ssl.SSLWantReadError:
            pass
        return b"".join(found)


def connected(client: Client | None = None, context: SSL.Context | None = None) -> tuple[TlsLayer, Client]:
    client = client or Client()
    layer = TlsLayer(context or server_context())
    client.shake_hands(layer)
    assert layer.is_established
    return layer, client


def refuse(client: Client, context: SSL.Context, reason: str, alert: str) -> None:
    """The handshake fails on both sides, each with its reason."""
    layer = TlsLayer(context)
    with pytest.raises(LayerError, match=reason):
        client.shake_hands(layer)
    assert not layer.is_established
    with pytest.raises(ssl.SSLError, match=alert):
        client.decrypt(layer.take_output())
        client.tls.do_handshake()


# Bytes


def test_the_handshake_is_driven_by_what_arrives() -> None:
    layer, client = TlsLayer(server_context()), Client()
    assert not layer.is_established
    assert layer.take_output() == b""
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.do_handshake()
    hello = client.outgoing.read()
    assert list(layer.receive(hello[:50])) == []
    assert layer.take_output() == b""
    assert list(layer.receive(hello[50:])) == []
    client.incoming.write(layer.take_output())
    client.tls.do_handshake()
    assert not layer.is_established
    assert list(layer.receive(client.outgoing.read())) == []
    assert layer.is_established
    assert client.decrypt(layer.send(b"OK")) == b"OK"


def test_data_right_behind_the_handshake_is_received() -> None:
    layer, client = TlsLayer(server_context()), Client()
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.do_handshake()
    list(layer.receive(client.outgoing.read()))
    client.incoming.write(layer.take_output())
    client.tls.do_handshake()
    assert list(layer.receive(client.encrypt(b"early"))) == [b"early"]
    assert layer.is_established


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_handshake_in_small_steps(step: int) -> None:
    layer, client = TlsLayer(server_context()), Client()
    client.shake_hands(layer, step)
    assert layer.is_established


@settings(max_examples=50)
@given(
    sent=st.lists(st.builds(bytes, st.integers(0, 200_000)), max_size=3),
    step=st.sampled_from([7, 1000, 1 << 20]),
)
def test_what_is_sent_arrives_in_both_directions(sent: list[bytes], step: int) -> None:
    layer, client = connected()
    everything = b"".join(sent)
    assert b"".join(client.decrypt(layer.send(data)) for data in sent) == everything
    wire = b"".join(client.encrypt(data) for data in sent if data)
    wire = wire if len(wire) < 50_000 or step > 100 else b""
    pieces = [
        piece for start in range(0, len(wire), step) for piece in layer.receive(wire[start : start + step])
    ]
    assert b"".join(pieces) == (everything if wire else b"")
    assert all(0 < len(piece) <= MAX_PIECE for piece in pieces)


def test_memoryviews_are_sent_like_bytes() -> None:
    layer, client = connected()
    assert client.decrypt(layer.send(memoryview(b"--contents--")[2:-2])) == b"contents"
    assert layer.send(b"") == b""


def test_records_are_gathered_into_pieces() -> None:
    layer, client = connected()
    many = b"".join(client.encrypt(b"FIN 0123456789abcdef\n") for _ in range(1000))
    assert list(layer.receive(many)) == [b"FIN 0123456789abcdef\n" * 1000]


def test_a_reader_may_stop_and_go_on_later() -> None:
    layer, client = connected()
    sent = random.Random(1).randbytes(1 << 20)
    wire = client.encrypt(sent)
    received = [next(layer.receive(wire[: len(wire) // 2]))]
    received += [next(layer.receive(b"")), next(layer.receive(wire[len(wire) // 2 :]))]
    received += layer.receive(b"")
    assert b"".join(received) == sent


def test_pieces_are_decrypted_when_asked_for() -> None:
    layer, client = connected()
    wire = client.encrypt(bytes(8 << 20))
    tracemalloc.start()
    try:
        assert sum(len(piece) for piece in layer.receive(wire)) == 8 << 20
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("inner", [SnappyLayer, DeflateLayer])
def test_compression_inside_tls(inner: type[SnappyLayer | DeflateLayer]) -> None:
    client, tls = Client(), TlsLayer(server_context())
    stack = LayerStack([tls, inner()])
    assert not stack.is_established
    client.shake_hands(tls)
    assert stack.is_established
    peer = inner()
    opened = client.decrypt(stack.confirm(b"OK"))
    assert opened[:2] == b"OK"
    assert b"".join(peer.receive(opened[2:])) == b"OK"
    assert b"".join(stack.receive(client.encrypt(peer.send(b"NOP\n" * 9)))) == b"NOP\n" * 9
    assert b"".join(peer.receive(client.decrypt(stack.send(b"frame")))) == b"frame"


def test_close_sends_close_notify() -> None:
    layer, client = connected()
    last = layer.send(b"last words")
    layer.close()
    client.incoming.write(last + layer.take_output())
    assert client.tls.read(100) == b"last words"
    assert client.tls.read(100) == b""
    layer.close()


def test_close_notify_of_the_client_is_end_of_stream() -> None:
    layer, client = connected()
    wire = client.encrypt(b"last words")
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.unwrap()
    assert list(layer.receive(wire + client.outgoing.read())) == [b"last words"]
    assert layer.is_ended
    assert list(layer.receive(b"more")) == []
    layer.close()
    client.incoming.write(layer.take_output())
    client.tls.unwrap()


def test_nothing_is_sent_before_the_handshake_is_done() -> None:
    layer = TlsLayer(server_context())
    with pytest.raises(LayerError, match="handshake is not finished"):
        layer.send(b"OK")
    layer.close()
    assert layer.take_output() == b""


def test_an_established_connection_does_not_renegotiate() -> None:
    # The standard library's client cannot request it.
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    client, layer = SSL.Connection(context, None), TlsLayer(server_context())
    client.set_connect_state()

    def exchange() -> None:
        for _ in range(3):
            try:
                client.do_handshake()
            except SSL.WantReadError:
                pass
            try:
                assert list(layer.receive(client.bio_read(1 << 16))) == []
            except SSL.WantReadError:
                pass
            if spoken := layer.take_output():
                client.bio_write(spoken)

    exchange()
    assert layer.is_established
    assert client.renegotiate()
    with pytest.raises(SSL.Error, match="no renegotiation"):
        exchange()


# Garbage


@given(garbage=st.binary(min_size=5, max_size=2000))
def test_garbage_instead_of_a_handshake_is_refused(garbage: bytes) -> None:
    layer = TlsLayer(server_context())
    try:
        assert list(layer.receive(garbage)) == []
    except LayerError as error:
        assert error.reason.startswith("TLS: ")
    assert not layer.is_established


@pytest.mark.parametrize(
    ("spoken", "reason"),
    [(b"GET / HTTP/1.1\r\n\r\n", "TLS: http request"), (b"NOP\nNOP\n", "TLS: wrong version number")],
)
def test_plain_text_instead_of_a_handshake(spoken: bytes, reason: str) -> None:
    with pytest.raises(LayerError, match=reason):
        list(TlsLayer(server_context()).receive(spoken))


@given(data=st.data())
def test_a_damaged_handshake_gives_no_connection(data: st.DataObject) -> None:
    client, layer = Client(), TlsLayer(server_context())
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.do_handshake()
    hello = bytearray(client.outgoing.read())
    hello[data.draw(st.integers(0, len(hello) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        list(layer.receive(bytes(hello)))
    except LayerError:
        pass
    assert not layer.is_established


def test_a_damaged_record_fails_after_the_records_before_it() -> None:
    layer, client = connected()
    good, bad = client.encrypt(b"good"), bytearray(client.encrypt(b"bad"))
    bad[-1] ^= 1
    pieces = layer.receive(good + bytes(bad))
    assert next(pieces) == b"good"
    with pytest.raises(LayerError, match="TLS: decryption failed or bad record mac"):
        next(pieces)
    assert layer.take_output()
    for _ in range(2):
        with pytest.raises(LayerError):
            list(layer.receive(good))


# Versions and cipher suites


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_from_the_minimum_on_is_negotiated(version: str) -> None:
    layer, client = connected(Client(version=version), server_context(min_version=version))
    assert layer.version == version.upper()
    assert client.decrypt(layer.send(b"x" * 50_000)) == b"x" * 50_000
    assert b"".join(layer.receive(client.encrypt(b"y" * 50_000))) == b"y" * 50_000


@pytest.mark.parametrize(
    ("version", "minimum"), [("tls1.0", "tls1.1"), ("tls1.1", "tls1.2"), ("tls1.2", "tls1.3")]
)
def test_older_versions_are_refused(version: str, minimum: str) -> None:
    context = server_context(min_version=minimum)
    refuse(Client(version=version), context, "TLS: unsupported protocol", "(?i)alert protocol version")


def test_by_default_the_newest_version_is_taken() -> None:
    layer, _ = connected()
    assert (layer.version, layer.cipher_suite) == ("TLS1.3", "TLS_AES_128_GCM_SHA256")
    assert (layer.common_name, layer.negotiated_protocol) == ("", "")


SUITES = {
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-RSA-AES256-GCM-SHA384": "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "ECDHE-RSA-CHACHA20-POLY1305": "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "ECDHE-RSA-AES128-SHA": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "ECDHE-RSA-AES256-SHA": "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "AES128-GCM-SHA256": "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-SHA": "TLS_RSA_WITH_AES_256_CBC_SHA",
}


@pytest.fixture(scope="module")
def rsa_server(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    ca = certificates().ca
    return issue(tmp_path_factory.mktemp("rsa"), "rsa", signer=ca, hosts=("localhost",), use_rsa=True)


@pytest.mark.parametrize(("name", "shown"), SUITES.items(), ids=SUITES)
def test_cipher_suites_have_the_names_that_nsq_shows(rsa_server: Pair, name: str, shown: str) -> None:
    client = Client(version="tls1.2", ciphers=f"{name}:@SECLEVEL=0")
    layer, _ = connected(client, server_context(rsa_server))
    assert (layer.version, layer.cipher_suite) == ("TLS1.2", shown)


def test_an_unknown_cipher_suite_is_refused(rsa_server: Pair) -> None:
    client = Client(version="tls1.2", ciphers="DHE-RSA-AES256-GCM-SHA384")
    refuse(client, server_context(rsa_server), "TLS: no shared cipher", "alert handshake failure")


def test_no_protocol_is_negotiated() -> None:
    layer, client = connected(Client(protocols=("h2", "http/1.1")))
    assert layer.negotiated_protocol == ""
    assert client.tls.selected_alpn_protocol() is None


# Client certificates


def test_without_a_policy_no_certificate_is_requested() -> None:
    layer, _ = connected(Client(certificates().client))
    assert layer.common_name == ""


@pytest.mark.parametrize("version", ["tls1.2", "tls1.3"])
@pytest.mark.parametrize("name", ["client", "foreign"])
@pytest.mark.parametrize("ca_file", ["", "ca"])
def test_require_takes_any_certificate(version: str, name: str, ca_file: str) -> None:
    found = certificates()
    rules = {"root_ca_file": str(found.ca.cert)} if ca_file else {}
    client = Client(getattr(found, name), version=version)
    layer, _ = connected(client, server_context(policy="require", **rules))
    assert layer.common_name == name


def test_require_takes_an_expired_certificate(tmp_path: Path) -> None:
    expired = issue(tmp_path, "old", signer=certificates().ca, is_expired=True)
    layer, _ = connected(Client(expired), server_context(policy="require"))
    assert layer.common_name == "old"


@pytest.mark.parametrize("policy", ["require", "require-verify"])
@pytest.mark.parametrize(
    ("version", "alert"), [("tls1.2", "handshake failure"), ("tls1.3", "certificate required")]
)
def test_both_policies_refuse_a_client_without_certificate(policy: str, version: str, alert: str) -> None:
    context = server_context(policy=policy, root_ca_file=str(certificates().ca.cert))
    refuse(Client(version=version), context, "TLS: peer did not return a certificate", alert)


@pytest.mark.parametrize("version", ["tls1.2", "tls1.3"])
def test_require_verify_takes_a_certificate_of_the_authority_only(version: str) -> None:
    found = certificates()
    context = server_context(policy="require-verify", root_ca_file=str(found.ca.cert))
    layer, _ = connected(Client(found.client, version=version), context)
    assert layer.common_name == "client"
    refuse(Client(found.foreign, version=version), context, "certificate verify failed", "alert unknown ca")


def test_require_verify_refuses_an_expired_certificate(tmp_path: Path) -> None:
    ca = certificates().ca
    context = server_context(policy="require-verify", root_ca_file=str(ca.cert))
    expired = issue(tmp_path, "old", signer=ca, is_expired=True)
    refuse(Client(expired), context, "certificate verify failed", "alert certificate expired")


def test_require_verify_without_an_authority_uses_those_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = certificates()
    refuse(Client(found.client), server_context(policy="require-verify"), "verify failed", "unknown ca")
    monkeypatch.setenv("SSL_CERT_FILE", str(found.ca.cert))
    layer, _ = connected(Client(found.client), server_context(policy="require-verify"))
    assert layer.common_name == "client"


def test_an_unknown_policy_requests_no_certificate() -> None:
    layer, _ = connected(Client(certificates().client), server_context(policy="something"))
    assert layer.common_name == ""


@pytest.mark.parametrize(("names", "shown"), [((), ""), (("first", "last"), "last"), (("Zoë",), "Zoë")])
def test_common_name_of_odd_certificates(tmp_path: Path, names: tuple[str, ...], shown: str) -> None:
    odd = issue(tmp_path, "odd", common_names=names)
    layer, _ = connected(Client(odd), server_context(policy="require"))
    assert layer.common_name == shown


# Contexts


def test_a_new_context_is_for_new_connections_only(tmp_path: Path) -> None:
    other_ca = issue(tmp_path, "other-ca", is_authority=True)
    other = issue(tmp_path, "server", signer=other_ca, hosts=("localhost",))
    old_layer, old_client = connected()
    new_layer, new_client = connected(Client(ca=other_ca), server_context(other))
    serials = [client.tls.getpeercert()["serialNumber"] for client in (old_client, new_client)]
    assert len(set(serials)) == 2
    for layer, client in ((old_layer, old_client), (new_layer, new_client)):
        assert client.decrypt(layer.send(b"still here")) == b"still here"


def test_a_chain_of_certificates_is_sent_whole(tmp_path: Path) -> None:
    ca = certificates().ca
    middle = issue(tmp_path, "middle", signer=ca, is_authority=True)
    leaf = issue(tmp_path, "leaf", signer=middle, hosts=("localhost",))
    leaf.cert.write_bytes(leaf.cert.read_bytes() + middle.cert.read_bytes())
    connected(context=server_context(leaf))


def refused_start(*arguments: object, **rules: object) -> str:
    with pytest.raises(StartError) as refused:
        build_context(*map(str, arguments), **{name: str(value) for name, value in rules.items()})
    return str(refused.value)


def test_files_that_cannot_be_used_are_named_with_their_flag(tmp_path: Path) -> None:
    found = certificates()
    cert, key = found.server.cert, found.server.key
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    assert refused_start(missing, key) == f"--tls-cert: {missing}: No such file or directory"
    assert refused_start(cert, missing) == f"--tls-key: {missing}: No such file or directory"
    assert refused_start(tmp_path, key) == f"--tls-cert: {tmp_path}: Is a directory"
    assert refused_start(empty, key).startswith(f"--tls-cert: {empty}: not a certificate in PEM format")
    assert refused_start(cert, empty) == f"--tls-key: {empty}: not a private key in PEM format"
    assert refused_start(cert, found.client.key) == f"--tls-key: {found.client.key}: not the key of {cert}"
    for policy in ("", "require", "require-verify"):
        rules = {"policy": policy, "root_ca_file": empty}
        assert refused_start(cert, key, **rules).startswith(f"--tls-root-ca-file: {empty}: no certificates")
        rules = {"policy": policy, "root_ca_file": missing}
        assert refused_start(cert, key, **rules).startswith(f"--tls-root-ca-file: {missing}: No such file")


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(tmp_path: Path) -> None:
    locked = issue(tmp_path, "locked", hosts=("localhost",), passphrase=b"secret")
    text = refused_start(locked.cert, locked.key)
    assert text == f"--tls-key: {locked.key}: the key has a passphrase, which is not supported"


@pytest.mark.parametrize("fails", [False, True], ids=["in use", "failed"])
def test_a_layer_is_freed_with_its_last_reference(fails: bool) -> None:
    layer, client = connected()
    with freed_without_collecting(layer):
        client.decrypt(layer.send(b"something"))
        try:
            list(layer.receive(bytes(100) if fails else client.encrypt(b"something")))
        except LayerError:
            pass
        del layer
