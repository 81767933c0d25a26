"""Arguments and options that several commands share, and how their text is read."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnet import units
from swarmnet.addresses import check_listen_address, check_peer_address, parse_endpoint, parse_hosts
from swarmnet.cli.option_groups import From
from swarmnet.paths import TRANSPORT_VARIABLE, default_cache_dir, default_data_dir
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.multiaddr import PEER_ID
from swarmnet_protocols.net.p2pd.process import MIN_MEMORY_BYTES


def _each(check: Callable[[str], None]) -> Callable[[list[str]], list[str]]:
    """Return a callback that checks every value of a repeatable option."""

    def check_all(values: list[str]) -> list[str]:
        for value in values:
            check(value)
        return values

    return check_all


def _check_devices(text: str) -> str:
    for name in text.split(","):
        _check_device(name)
    return text


def _check_device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", text):
        raise typer.BadParameter(
            f"{text!r} is not a device: use auto, cpu, cuda, cuda:N or mps", param_hint="'--device'"
        )
    return text


def choice(name: str, values: Sequence[str], about: str, panel: str | None = None) -> Any:
    """Return the option ``name`` that takes one of ``values``. ``about``: its help text, shown in
    ``panel``."""

    def check(text: str) -> str:
        if text not in values:
            known = f"{', '.join(values[:-1])} or {values[-1]}"
            raise typer.BadParameter(f"{text!r} is unknown: use {known}", param_hint=f"'{name}'")
        return text

    return typer.Option(name, metavar="|".join(values), help=about, callback=check, rich_help_panel=panel)


def _choose_transport(name: str) -> str:
    if name not in {"auto", "p2pd", "libp2p"}:
        raise typer.BadParameter(
            f"{name!r} is not a transport: use auto, p2pd or libp2p", param_hint="'--transport'"
        )
    os.environ[TRANSPORT_VARIABLE] = name
    return name


def _check_name(name: str) -> str:
    if len(name) > 64 or not name.isprintable():
        raise typer.BadParameter("use at most 64 printable characters", param_hint="'--name'")
    return name


def _read_p2pd_bytes(text: str) -> int:
    size_bytes = units.parse_size_bytes(text)
    if size_bytes < MIN_MEMORY_BYTES:
        raise ValueError(f"p2pd needs at least {units.show_memory(MIN_MEMORY_BYTES)}")
    return size_bytes


SwarmPath = Annotated[
    Path, typer.Argument(metavar="SWARM", help="The swarm.toml or its directory.", show_default=False)
]


ENTERED = (
    "A swarm.toml or its directory, an invite (swn1…), or the name of a swarm this machine joined before."
)
SwarmArgument = Annotated[str, typer.Argument(metavar="SWARM", help=ENTERED, show_default=False)]
OptionalSwarmArgument = Annotated[
    str | None,
    typer.Argument(metavar="[SWARM]", help=ENTERED, show_default="the swarm of this room, by a code"),
]
SwarmOption = Annotated[str, typer.Option("--swarm", metavar="SWARM", help=ENTERED, show_default=False)]
_MODEL = "The model: a known name, a directory, a .gguf file, or org/name[@revision][:FILE.gguf] on the Hugging Face hub."
ModelArgument = Annotated[str, typer.Argument(metavar="M", help=_MODEL)]
ModelOption = Annotated[str, typer.Option("--model", "-m", metavar="M", help=_MODEL)]

ServedModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help="Serve only this model, open from the start: see `run`.",
        show_default="all that hosts announce",
    ),
]


def _bootstrap(about: str) -> Any:
    return typer.Option("--bootstrap", metavar="ADDR", help=about, callback=_each(check_peer_address))


BootstrapOption = Annotated[
    list[str],
    _bootstrap("Enter the swarm through this peer as well as through those in the swarm file; repeatable."),
]
FileBootstrapOption = Annotated[
    list[str], _bootstrap("Write this address of a peer into the swarm file; repeatable.")
]
InviteBootstrapOption = Annotated[
    list[str],
    _bootstrap("Put this address of a peer into the invite, next to those in the swarm file; repeatable."),
]
HostsOption = Annotated[
    tuple[PeerId, ...],
    typer.Option(
        "--hosts",
        metavar="PEER,PEER",
        help="Use only these hosts.",
        show_default="those the swarm file trusts, or all",
    ),
    From(str, parse_hosts, ""),
]
DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Folder for keys, certificates and a node's control socket.",
        default_factory=default_data_dir,
        show_default="per user",
    ),
]


@dataclass(frozen=True, kw_only=True)
class OwnSwarm:
    """A swarm of this user: its folder, or the name of a household and where its files are."""

    swarm: Annotated[
        Path,
        typer.Argument(
            metavar="[SWARM]",
            help="The swarm.toml or its directory, or the name of a swarm that `swarmnet start` made.",
            show_default="this directory",
        ),
    ] = Path()
    data_dir: DataDirOption

    @property
    def path(self) -> Path:
        """The swarm file or its folder."""
        from swarmnet import swarm_file
        from swarmnet.swarm_file.household import find_own

        is_given = swarm_file.file_in(self.swarm).is_file()
        return self.swarm if is_given else find_own(self.data_dir, str(self.swarm)) or self.swarm


ListenOption = Annotated[
    list[str],
    typer.Option(
        "--listen",
        metavar="MULTIADDR",
        help="Address to listen on; repeatable.",
        show_default="the ports it had last, or any",
        callback=_each(check_listen_address),
    ),
]
MaxP2pdOption = Annotated[
    int,
    typer.Option(
        "--max-p2pd",
        metavar="SIZE",
        help="Restart p2pd, the libp2p process, when it takes more memory than this.",
        show_default="256MiB",
    ),
    From(str, _read_p2pd_bytes, "256MiB"),
]
TransportOption = Annotated[
    str,
    typer.Option(
        "--transport",
        metavar="NAME",
        help="p2pd, or libp2p (py-libp2p, all in Python). auto: p2pd if its binary is installed, else libp2p.",
        callback=_choose_transport,
        envvar=TRANSPORT_VARIABLE,
        show_envvar=False,
    ),
]
AnnounceOption = Annotated[
    list[str],
    typer.Option(
        "--announce",
        metavar="MULTIADDR",
        help="Tell other peers to dial this address, such as one that a router forwards; repeatable.",
        callback=_each(check_listen_address),
    ),
]
HostOption = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Address to listen on. An address that other machines reach needs a key.",
    ),
]
PortOption = Annotated[
    int,
    typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on; 0 takes a free one."),
]
IssuerOption = Annotated[
    Path | None,
    typer.Option(
        "--issuer", metavar="KEY", help="Admit new members with this key: authority.key, or an issuer's key."
    ),
]
CacheDirOption = Annotated[
    Path,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Folder for model files.",
        default_factory=default_cache_dir,
        show_default="per user",
    ),
]
MaxDiskOption = Annotated[
    int | None,
    typer.Option(
        "--max-disk",
        metavar="SIZE",
        help="Disk space for downloaded model files. When it is full, the least recently used files are removed.",
        show_default="no limit",
    ),
    From(str, units.parse_size_bytes),
]
SpeculateOption = Annotated[
    bool,
    typer.Option(
        "--speculate/--no-speculate",
        help="Guess the next tokens, so that one trip through the hosts may yield several. Answers stay the same.",
    ),
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="M",
        help="Guess tokens with this small model, which runs here and has the same tokenizer. Answers stay the same.",
        show_default="guess from the text itself",
    ),
]
DtypeOption = Annotated[
    str,
    choice(
        "--dtype",
        ("auto", "float32", "bfloat16"),
        "Number format of the weights. auto: on a CPU as the gguf file stores them, or float32; bfloat16 on a GPU.",
    ),
]
WireOption = Annotated[
    str,
    choice(
        "--wire",
        ("auto", "float32", "bfloat16", "int8"),
        "Number format of activations between hosts. auto: as the hosts compute. int8, for slow links: a quarter of float32's bytes, but answers may change.",
    ),
]
HostDtypeOption = Annotated[
    str,
    choice(
        "--dtype",
        ("auto", "float32", "bfloat16", "int8", "int4"),
        "Number format of the weights. auto: as stored on a CPU, bfloat16 on a GPU. int8 and int4 quantise while loading, so that more blocks fit.",
    ),
]


def endpoint_option(name: str, about: str) -> Any:
    """Return an option that takes ``[HOST:]PORT`` and serves something there. ``about``: its help
    text."""
    return typer.Option(name, metavar="[HOST:]PORT", help=about, show_default=False)


ENDPOINT = From(str, parse_endpoint)
MetricsOption = Annotated[
    tuple[str, int] | None,
    endpoint_option(
        "--metrics",
        "Serve Prometheus metrics (/metrics) and health checks (/livez, /readyz) on this port; 0 takes a free one.",
    ),
    ENDPOINT,
]
AllowHostOption = Annotated[
    list[str],
    typer.Option("--allow-host", metavar="NAME", help="Host name under which browsers open it; repeatable."),
]
PublicNameOption = Annotated[
    str,
    typer.Option(
        "--public-name",
        "--name",
        metavar="NAME",
        help="Name of this node that everybody sees, such as on the dashboard.",
        callback=_check_name,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
StopOnEofFlag = Annotated[bool, typer.Option("--stop-on-eof", hidden=True)]


def devices_option(about: str) -> Any:
    """Return the option `--device` of a command that can use several devices. ``about``: its help
    text."""
    return typer.Option("--device", metavar="auto|cpu|cuda[:N[,…]]|mps", help=about, callback=_check_devices)


def device_option(about: str) -> Any:
    """Return the option `--device` of a command that uses one device. ``about``: its help text."""
    return typer.Option("--device", metavar="auto|cpu|cuda[:N]|mps", help=about, callback=_check_device)


def check_peer_id(text: str) -> PeerId:
    if not PEER_ID.fullmatch(text):
        raise typer.BadParameter(
            f"{text[:80]!r} is not a peer id: it looks like 12D3Koo…", param_hint="'PEER'"
        )
    return PeerId(text)


def check_at_least_zero(value: float, *, option: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise typer.BadParameter(
            f"{value} is not possible: give a number that is 0 or more", param_hint=f"'{option}'"
        )
    return value


def check_draft(draft: str, *, speculate: bool) -> None:
    if draft and not speculate:
        raise typer.BadParameter(
            "a draft model needs speculation: leave out --no-speculate", param_hint="'--draft'"
        )


def check_share(value: float, *, option: str) -> float:
    if not 0 < value <= 1:
        raise typer.BadParameter(
            f"{value} is not possible: give a number above 0, up to 1", param_hint=f"'{option}'"
        )
    return value
