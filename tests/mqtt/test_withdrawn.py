"""Certificates that their CA has withdrawn, and clients that an operator disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import ssl
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.testbed.certificates import Authority, Pair
from bridge.access.rules import TRUSTED, AccessRule, Identity
from bridge.errors import ConfigError, InvalidRequest, Unauthorized
from bridge.mqtt.settings import TlsSettings
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.net.crl import certified, read_crls
from bridge.operations.catalog import OfClient, OfClients

from .harness import Bridge, Client, Packet, connect, publish
from .test_access import open_tls, users, with_bridge
from .test_revocation import ANN, BOB, log_in


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


def with_lists(root: Path, test: Any, lists: Path, authority: Authority) -> None:
    """A bridge that asks for certificates of an authority, with its lists."""
    server = authority.issue("server")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert, crl_file=lists)
    with_bridge(root, test, listen=["tls://127.0.0.1:0"], tls=tls)


async def refused(bridge: Bridge, authority: Authority, pair: Pair) -> bool:
    """Whether a client with this certificate gets nowhere."""
    try:
        client = await open_tls(bridge, authority, pair)
        return (await client.exchange(connect("c"))).body[1] == 5
    except OSError:
        return True


def test_a_withdrawn_certificate_ends_its_connection_and_comes_in_no_more(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    good, bad = authority.issue("good"), authority.issue("bad")
    lists = tmp_path / "lists.pem"
    lists.write_text(authority.revoke(name="none").read_text())

    async def test(bridge: Bridge) -> None:
        stays = await open_tls(bridge, authority, good)
        await stays.connect("good")
        goes = await open_tls(bridge, authority, bad)
        goes.level = V5
        await goes.connect("bad", level=V5, will=("in/will", b"x", 1))
        lists.write_text(authority.revoke(bad, name="one").read_text())
        bridge.front.reload(bridge.config)
        assert (await goes.receive()).head == 0xE0
        assert await goes.closed()
        assert await stays.alive()
        assert await refused(bridge, authority, bad)
        assert bridge.stat("refused_tls") == 1
        assert await bridge.payloads() == [], "nor is its will published"
        lists.write_text("nonsense")
        bridge.front.reload(bridge.config)
        assert await refused(bridge, authority, bad), "the old list holds"

    with_lists(tmp_path, test, lists, authority)


def test_a_certificate_that_expires_ends_its_connection_and_its_session_waits_for_a_new_one(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    short, inner = authority.issue("short", days=1), authority.below("inner-ca", days=1)
    server, below, long = authority.issue("server"), inner.issue("below"), authority.issue("long")
    roots = tmp_path / "roots.pem"
    roots.write_text(authority.cert.read_text() + inner.cert.read_text())
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=roots)

    async def test(bridge: Bridge) -> None:
        clients = []
        for number, pair in enumerate((short, below, long)):
            client = await open_tls(bridge, authority, pair)
            client.level = V5
            properties = {p.SESSION_EXPIRY: 1_000_000}
            await client.connect(f"c{number}", level=V5, properties=properties)
            clients.append(client)
        assert await clients[0].alive()
        bridge.system.step(1.5 * 86_400)
        for client in clients[:2]:
            assert await client.receive() == Packet(0xE0, b"\xa0\0"), "Maximum connect time"
            assert await client.closed()
        assert await clients[2].alive()
        again = await open_tls(bridge, authority, short)  # TLS has another clock, so it lets it in
        await again.connect("c0", level=V5, clean=False, expect=0x87)
        authority.issue("short")
        again = await open_tls(bridge, authority, short)
        answer = await again.connect("c0", level=V5, clean=False)
        assert answer.body[0] == 1, "the session is there"

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls, hurry=60)


def test_an_expired_list_refuses_all_certificates_and_one_of_another_authority_is_refused(
    tmp_path: Path,
) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other-ca")
    device = authority.issue("device")
    good = authority.revoke(name="good")
    old, foreign = authority.revoke(days=0, name="old"), other.revoke(name="foreign")
    lists = tmp_path / "lists.pem"
    lists.write_text(good.read_text())

    async def test(bridge: Bridge) -> None:
        stays = await open_tls(bridge, authority, device)
        await stays.connect("stays")
        lists.write_text(old.read_text())
        bridge.front.reload(bridge.config)
        assert await refused(bridge, authority, device)
        assert await stays.alive(), "it was let in while the list was good"
        lists.write_text(foreign.read_text())
        bridge.front.reload(bridge.config)
        assert await refused(bridge, authority, device), "the old list holds"
        lists.write_text(foreign.read_text() + good.read_text())
        bridge.front.reload(bridge.config)
        assert not await refused(bridge, authority, device)

    with_lists(tmp_path, test, lists, authority)


def test_lists_that_are_not_taken_change_nothing_for_anybody(tmp_path: Path) -> None:
    """Also those that OpenSSL would take: the old lists hold, for who is withdrawn and for who is not."""
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other-ca")
    good, bad = authority.issue("good"), authority.issue("bad")
    lists, none = tmp_path / "lists.pem", authority.revoke(name="none").read_text()
    foreign = other.revoke(name="foreign").read_text()
    cut = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"
    lists.write_text(authority.revoke(bad, name="one").read_text())

    async def test(bridge: Bridge) -> None:
        for number, text in enumerate((foreign, made_list(1, delta=True)[0], none + cut, none + foreign)):
            lists.write_text(text)
            bridge.front.reload(bridge.config)
            assert not await refused(bridge, authority, good), number
            assert await refused(bridge, authority, bad) == (number < 3), number

    with_lists(tmp_path, test, lists, authority)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_tls_ticket_leads_around_a_list_that_has_expired(tmp_path: Path, version: ssl.TLSVersion) -> None:
    authority = Authority(tmp_path / "ca")
    device = authority.issue("device")

    async def test(bridge: Bridge) -> None:
        async def attempt(ticket: ssl.SSLSession | None = None) -> Any:
            return await asyncio.to_thread(log_in, bridge, authority, device, version, ticket)

        _, _, ticket = await attempt()
        code, resumed, ticket = await attempt(ticket)
        assert (code, resumed) == (b"\0", True), "a ticket serves while the list is good"
        bridge.system.step(1.5 * 86_400)
        assert (await attempt(ticket))[:2] == (b"\5", True)

    with_lists(tmp_path, test, authority.revoke(days=1), authority)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_what_a_withdrawn_authority_has_signed_is_refused_also_with_a_tls_ticket(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    root = Authority(tmp_path / "ca")
    inner, other = root.below("inner-ca"), root.below("other-ca")
    pairs = []
    for number, authority in enumerate((inner, inner, other)):
        pair = authority.issue(f"below-{number}")
        pair.cert.write_text(pair.cert.read_text() + authority.cert.read_text())
        pairs.append(pair)
    bad, fresh, good = pairs
    below = "".join(one.revoke(name=f"list-{one.cert.stem}").read_text() for one in (inner, other))
    lists = tmp_path / "lists.pem"
    lists.write_text(root.revoke(name="none").read_text() + below)

    async def test(bridge: Bridge) -> None:
        async def attempt(pair: Pair, ticket: ssl.SSLSession | None = None) -> Any:
            return await asyncio.to_thread(log_in, bridge, root, pair, version, ticket)

        goes, stays = await open_tls(bridge, root, bad), await open_tls(bridge, root, good)
        await goes.connect("goes")
        await stays.connect("stays")
        withdrawn = Pair(inner.cert, inner.cert)
        lists.write_text(root.revoke(withdrawn, name="one").read_text() + below)
        bridge.front.reload(bridge.config)
        assert await goes.closed()
        assert await stays.alive()
        for pair in (bad, fresh):
            code, _, ticket = await attempt(pair)
            assert code == b"\5"
            assert (await attempt(pair, ticket))[:2] == (b"\5", True), "TLS has given a ticket all the same"
        for ticket in (None, (await attempt(good))[2]):
            assert (await attempt(good, ticket))[:2] == (b"\0", ticket is not None)

    with_lists(tmp_path, test, lists, root)


def test_lists_are_read_exactly_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pairs = [authority.issue(f"dev-{number}") for number in range(3)]
    path = authority.revoke(*pairs[:2])
    crls = read_crls("o", path)
    assert [crls.revoke(der(pair)) for pair in pairs] == [True, True, False]
    assert crls.expires is not None
    text = path.read_text()
    (tmp_path / "none.pem").write_text(pairs[0].cert.read_text())
    with pytest.raises(ConfigError, match="no list in PEM"):
        read_crls("o", tmp_path / "none.pem")
    chance = random.Random(7)
    whole = ssl.PEM_cert_to_DER_cert(text.replace("X509 CRL", "CERTIFICATE"))
    for _ in range(2000):
        changed = bytearray(whole)
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        damaged = changed[: chance.randrange(len(changed))] if chance.random() < 0.3 else changed
        pem = ssl.DER_cert_to_PEM_cert(bytes(damaged)).replace("CERTIFICATE", "X509 CRL")
        (tmp_path / "damaged.pem").write_text(pem)
        with contextlib.suppress(ConfigError):
            read_crls("o", tmp_path / "damaged.pem").revoke(der(pairs[0]))


def test_each_file_of_a_listener_applies_whatever_is_wrong_with_the_others(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first", "first-ca"), Authority(tmp_path / "second", "second-ca")
    server, roots, lists = first.issue("server"), tmp_path / "roots.pem", tmp_path / "lists.pem"
    roots.write_text(first.cert.read_text() + second.cert.read_text())
    none = "".join(one.revoke(name="none").read_text() for one in (first, second))
    lists.write_text(none)
    devices = {name: first.issue(name) for name in ("by-list", "by-ca", "stays")}
    devices["by-ca"] = second.issue("by-ca")
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=roots, crl_file=lists)

    async def test(bridge: Bridge) -> None:
        async def connected(name: str) -> Client:
            client = await open_tls(bridge, first, devices[name])
            await client.connect(name)
            return client

        here = {name: await connected(name) for name in devices}
        cert, key = server.cert.read_text(), server.key.read_text()
        server.cert.write_text("broken")
        lists.write_text(
            first.revoke(devices["by-list"], name="one").read_text() + second.revoke().read_text()
        )
        bridge.front.reload(bridge.config)
        assert await here["by-list"].closed()
        assert await refused(bridge, first, devices["by-list"])
        here["again"] = await connected("stays")
        lists.write_text("broken")
        roots.write_text(first.cert.read_text())
        bridge.front.reload(bridge.config)
        assert await here["by-ca"].closed()
        assert await refused(bridge, first, devices["by-ca"])
        renewed = first.issue("server")
        assert renewed.cert.read_text() != cert
        assert renewed.key.read_text() != key
        bridge.front.reload(bridge.config)
        shown = await open_tls(bridge, first, devices["stays"])
        certificate = shown.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert certificate == der(renewed), "the new certificate, though the lists are still broken"
        assert await refused(bridge, first, devices["by-list"]), "nor is the list forgotten"

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls)


def test_a_client_whose_authority_has_no_list_any_more_is_out(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first", "first-ca"), Authority(tmp_path / "second", "second-ca")
    server, roots, lists = first.issue("server"), tmp_path / "roots.pem", tmp_path / "lists.pem"
    roots.write_text(first.cert.read_text() + second.cert.read_text())
    lists.write_text(first.revoke().read_text() + second.revoke().read_text())
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=roots, crl_file=lists)

    async def test(bridge: Bridge) -> None:
        goes, stays = [await open_tls(bridge, first, one.issue("dev")) for one in (second, first)]
        await goes.connect("goes")
        await stays.connect("stays")
        lists.write_text(first.revoke().read_text())
        bridge.front.reload(bridge.config)
        assert await goes.closed()
        assert await stays.alive()

    with_bridge(tmp_path, test, listen=["tls://127.0.0.1:0"], tls=tls)


def made_list(
    count: int, *, delta: bool = False, name: str = "maker", days: float = 1
) -> tuple[str, list[int]]:
    """A list in PEM with so many serial numbers, of many sizes; and these. It expires after so many days."""
    key, chance = ec.generate_private_key(ec.SECP256R1()), random.Random(count)
    now = datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder(
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), now, now + timedelta(days=days)
    )
    numbers = [chance.getrandbits(chance.choice([7, 8, 64, 128, 159])) + 1 for _ in range(count)]
    entry = x509.RevokedCertificateBuilder().revocation_date(now)
    revoked = [entry.serial_number(number).build() for number in dict.fromkeys(numbers)]
    builder._revoked_certificates = revoked  # one by one takes a time that grows with the square
    if delta:
        builder = builder.add_extension(x509.DeltaCRLIndicator(1), critical=True)
    made = builder.sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode(), numbers


def test_a_delta_list_counts_only_beside_the_complete_list_of_its_authority(tmp_path: Path) -> None:
    (delta, fresh), (complete, old) = made_list(3, delta=True), made_list(5)
    path = tmp_path / "lists.pem"
    path.write_text(delta)
    with pytest.raises(ConfigError, match=r"list number 1 in it is a delta list.*add the complete list"):
        read_crls("o", path)
    path.write_text(complete + delta)
    crls = read_crls("o", path)
    issuer = crls.lists[0].issuer
    assert all(crls.revoked((issuer, serial(number))) for number in fresh + old)
    path.write_text(made_list(4, name="other")[0] + delta)
    with pytest.raises(ConfigError, match="list number 2"):
        read_crls("o", path)


@pytest.mark.parametrize("days", [(1, 3), (3, 1), (1, 1), (1, 3, 2)], ids=str)
def test_a_delta_list_neither_renews_nor_ends_the_complete_list_of_its_authority(
    tmp_path: Path, days: tuple[int, ...]
) -> None:
    """The first is of the complete list, the second of the delta, a third of another complete list."""
    lists = [made_list(3, delta=number == 1, days=end)[0] for number, end in enumerate(days)]
    complete, path = max(days[::2]), tmp_path / "lists.pem"
    path.write_text(lists[0])
    (one,) = read_crls("o", path).lists
    for order in itertools.permutations([*lists, made_list(1, name="other", days=0.5)[0]]):
        path.write_text("".join(order))
        crls, now = read_crls("o", path), datetime.now(UTC)
        expired = [crls.expired(one.issuer, now + timedelta(days=day + 0.1)) for day in range(4)]
        assert expired == [day >= complete for day in range(4)]
        assert crls.expires is not None
        assert crls.expires - now < timedelta(days=0.6), "the first of all is what the operator must know of"


def test_a_long_list_is_read_exactly_and_takes_little_memory(tmp_path: Path) -> None:
    text, numbers = made_list(20_000)
    path = tmp_path / "lists.pem"
    path.write_text(text)
    tracemalloc.start()
    try:
        crls = read_crls("o", path)
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 20_000 * 40
    assert most < 4 * len(text)
    issuer = crls.lists[0].issuer
    known = set(numbers)
    assert all(crls.revoked((issuer, serial(number))) for number in known)
    chance = random.Random(1)
    others = {chance.getrandbits(bits) for bits in (64, 128, 159) for _ in range(2000)} - known
    assert not any(crls.revoked((issuer, serial(number))) for number in others)


def serial(number: int) -> bytes:
    """A serial number as in DER."""
    return number.to_bytes(number.bit_length() // 8 + 1, "big")


def test_clients_are_disconnected_by_user_certificate_and_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    one, two = authority.issue("one"), authority.issue("two")
    serial = certified(der(two))[1].hex()

    async def test(bridge: Bridge) -> None:
        async def clients() -> list[Client]:
            found = []
            for number, pair in enumerate((one, one, two)):
                found.append(await open_tls(bridge, authority, pair))
                await found[-1].connect(f"c{number}")
            return found

        def disconnect(**given: str) -> list[str]:
            done = bridge.operations.call_now("disconnectClients", OfClients(**given), TRUSTED)
            return list(done.clients)  # type: ignore[union-attr]

        first = await clients()
        assert disconnect(user="one") == ["c0", "c1"]
        assert [await client.closed() for client in first[:2]] == [True, True]
        assert await first[2].alive()
        assert disconnect(user="one") == []
        assert disconnect(certificate=serial, user="one") == []
        assert disconnect(certificate=serial) == ["c2"]
        second = await clients()
        fingerprint = hashlib.sha256(der(two)).hexdigest().upper()
        colons = ":".join(fingerprint[at : at + 2] for at in range(0, 64, 2))
        assert disconnect(certificate=colons) == ["c2"]
        assert disconnect(address="192.0.2.0/24") == []
        assert disconnect(address="127.0.0.0/8", client="c1") == ["c1"]
        assert await second[0].alive()
        for wrong in ({}, {"client": "nobody"}, {"certificate": "xyz"}, {"address": "here"}):
            with pytest.raises(InvalidRequest):
                disconnect(**wrong)

    with_lists(tmp_path, test, authority.revoke(), authority)


def test_to_disconnect_clients_takes_a_right_of_its_own(tmp_path: Path) -> None:
    rules = [
        AccessRule(publish=["streambridge/%c/+"]),
        AccessRule(user="ann", manage=["clients"]),
        AccessRule(user="bob", manage=["streams/#"]),
    ]

    async def ask(client: Client, client_id: str, operation: str, **fields: Any) -> dict[str, Any]:
        client.send(publish(f"streambridge/{client_id}/{operation}", json.dumps(fields).encode()))
        found: dict[str, Any] = json.loads((await client.message()).payload)
        return found

    async def test(bridge: Bridge) -> None:
        ann = await bridge.connect("a", user="ann", password=b"a")
        bob = await bridge.connect("b", user="bob", password=b"b")
        for operation, fields in (("listClients", {}), ("disconnectClients", {"user": "ann"})):
            assert (await ask(bob, "b", operation, **fields))["statusName"] == "Unauthorized"
        with pytest.raises(Unauthorized):
            await bridge.operations.call("forgetClient", OfClient(client="a"), Identity("b", "bob", rules))
        assert [row["client"] for row in (await ask(ann, "a", "listClients"))["clients"]] == ["a", "b"]
        assert (await ask(ann, "a", "disconnectClients", user="bob"))["clients"] == ["b"]
        assert await bob.closed()

    with_bridge(tmp_path, test, users_file=users(tmp_path, f"{ANN}\n{BOB}\n"), acl=rules)
