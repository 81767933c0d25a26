"""``swarmnet swarm``: creates, shows, verifies and signs swarm files, and makes their keys."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from swarmnet import swarm_file
from swarmnet.cli.commands.swarm import members, status
from swarmnet.cli.lazy import command_group
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import CacheDirOption, FileBootstrapOption, JsonFlag, OwnSwarm, SwarmPath
from swarmnet.cli.output import note, print_json, print_result, print_table, print_text, progress
from swarmnet.swarm_file.content import ListedModel, SwarmFile
from swarmnet.swarm_file.keys import KEY_NAME
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet.units import parse_duration_s
from swarmnet_protocols.machine import lean_imports
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.rules import Admission
from swarmnet_protocols.wire.roles import name_roles

app = command_group("Create swarms, manage their members, and see what they do.")

WHO_IS_IN = {
    Admission.OPEN: "peers that have the file",
    Admission.CERTIFICATE: "invited peers, while their certificate is valid",
    Admission.ALLOW_LIST: "the peers that the file lists",
}
WHAT_IT_DOES_NOT_DO = "members see what passes through their machines: hosts see activations, from which most of a prompt can be reconstructed"


@app.command("create")
def create(  # noqa: PLR0913 - a command line, not an interface
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the swarm.", show_default=False)],
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Write the files to this folder.", show_default=False)
    ],
    is_open: Annotated[
        bool,
        typer.Option("--open", help="Let everybody who has the file take part. No authority key is made."),
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="FILE",
            help="Copy the rules (who is admitted, what is allowed) of this swarm file. deploy/swarms has examples.",
        ),
    ] = None,
    bootstrap: FileBootstrapOption = [],  # noqa: B006 - typer copies it
    mdns: Annotated[
        bool | None,
        typer.Option(
            "--mdns/--no-mdns",
            help="Let peers in one local network find each other, without a bootstrap address.",
            show_default="on, but off with --open",
        ),
    ] = None,
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="Make the swarm for this model: a directory, a .gguf file, or org/name. Members download it from each other; repeatable.",
            show_default="any model",
        ),
    ] = [],  # noqa: B006
    cache_dir: CacheDirOption,
    days: Annotated[
        int | None,
        typer.Option(
            "--days",
            metavar="N",
            min=1,
            max=36500,
            help="Days until the file expires.",
            show_default="never",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an existing swarm.toml. An existing authority key stays."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write DIR/swarm.toml, to publish, and unless --open DIR/authority.key, to keep secret.

    Without --open only members take part: `swarm invite` lets them in.

    \b
    Examples:
      swarmnet swarm create lab --open --out lab
      swarmnet swarm create lab --like deploy/swarms/lab.toml --out lab
      swarmnet swarm create lab --model ./my-model --out lab
    """
    if is_open and like is not None:
        raise typer.BadParameter("give either --open or --like", param_hint="'--like'")
    now = wall_clock()
    not_after = datetime.fromtimestamp(int(now), UTC) + timedelta(days=days) if days else None
    listed = [listed_model(each, cache_dir, quiet=as_json) for each in model]
    new = NewSwarm(name, tuple(bootstrap), not_after, is_open, mdns, like, models=tuple(listed))
    from swarmnet.swarm_file import writer as swarm_writer

    file = swarm_writer.create(out, new, now=now, overwrite=force)
    path = out / swarm_file.FILE_NAME
    if as_json:
        print_json(_summary(file) | {"path": str(path)})
        return
    print_text(f"wrote {path}: give it to every peer that takes part")
    if file.authority is not None:
        print_text(f"wrote {out / KEY_NAME}: keep it secret, and keep a copy")
    for each in listed:
        print_text(f"its model: {each.name}: members join with --model {each.name}")
        if each.pieces is None:
            note(
                f"  files of {each.name} are missing here, so members have to download it from the hub. To let members download from each other, run `swarmnet model pull {each.name}` and create the swarm again"
            )
    print_text(f"who takes part: {WHO_IS_IN[file.admission]}")
    print_text(f"what stays visible: {WHAT_IT_DOES_NOT_DO}")
    if file.admission is Admission.CERTIFICATE:
        print_text(f"next: swarmnet join {path} --issuer {out / KEY_NAME}")
    else:
        print_text(f"next: swarmnet join {path}")


def listed_model(name: str, cache_dir: Path, *, quiet: bool) -> ListedModel:
    """Return a model as the swarm file lists it. A local model is listed under the name of its file
    or directory, a model from the hub under its name on the hub."""
    from swarmnet_protocols.models import resolve
    from swarmnet_protocols.models.public_names import name_for_peers

    with progress(quiet=quiet) as report:
        lean_imports.use()
        local = resolve(name, cache_dir=cache_dir, progress=report)
        if local.is_whole:
            local.fetch()  # hashes the pieces
    return ListedModel(name_for_peers(name), local.manifest.hash, local.pieces_hash)


app.command("status")(status.status)
app.command("invite")(members.invite)
app.command("members")(members.members)
app.command("approve")(members.approve)
app.command("revoke")(members.revoke)


@app.command("show")
def show(swarm: SwarmPath, *, as_json: JsonFlag = False) -> None:
    """Print the content of a swarm file."""
    file = swarm_file.load(swarm)
    if as_json:
        print_json(_summary(file))
        return
    rows: dict[str, object] = {}
    for key, value in _summary(file).items():
        if value is None:
            rows[key] = "never"
        elif isinstance(value, dict):
            rows[key] = "\n".join(f"{name}: {each}" for name, each in value.items()) or "none"
        elif key in {"trusted_hosts", "first_and_last"}:
            rows[key] = "\n".join(map(str, value)) or "any"  # type: ignore[call-overload]
        elif isinstance(value, list):
            rows[key] = "\n".join(map(str, value)) or "none"
        else:
            rows[key] = value
    rows["anyone"] = name_roles(file.anyone)
    rows["members"] = (
        "\n".join(f"{peer}: {name_roles(roles)}" for peer, roles in file.allow.items()) or "none"
    )
    rows["takes part"] = WHO_IS_IN[file.admission]
    rows["visible"] = WHAT_IT_DOES_NOT_DO
    print_table(f"swarm {file.name}", rows)


@app.command("verify")
def verify(swarm: SwarmPath, *, as_json: JsonFlag = False) -> None:
    """Check that a swarm file is unchanged and still valid."""
    file = swarm_file.load_valid(swarm, wall_clock())
    how = (
        "signed by its authority" if file.authority else "no authority: only its bootstrap list may be edited"
    )
    text = f"{file.name} is valid ({how}); who takes part: {WHO_IS_IN[file.admission]}"
    print_result(_summary(file) | {"valid": True}, text, as_json=as_json)


@app.command("sign")
def sign(
    *,
    which: OwnSwarm,
    bootstrap: FileBootstrapOption = [],  # noqa: B006 - typer copies it
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="The authority's key.", show_default="next to the file"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign a swarm file after an edit; --bootstrap adds an address. Distribute the file again
    afterwards."""
    from swarmnet.swarm_file import writer as swarm_writer

    file = swarm_writer.sign(which.path, now=wall_clock(), key_path=key, bootstrap=bootstrap)
    signed = f"{file.name} is signed, serial {file.serial}" if file.authority else f"{file.name} is written"
    print_result(_summary(file), f"{signed}: give the file out again", as_json=as_json)


@app.command("new-key")
def new_key(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Write the key to this file.", show_default=False)
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Make a key for an issuer. List the public key under `issuers` in swarm.toml and sign the
    file."""
    from swarmnet.swarm_file.keys import create_key

    public = f"ed25519:{create_key(path).public_key.hex()}"
    if as_json:
        print_json({"path": str(path), "public_key": public})
        return
    print_text(public)
    note(
        f"wrote {path}: keep it secret. List its public key under issuers in swarm.toml: a node that has the key can then admit members"
    )


@app.command("rotate-key")
def rotate_key(
    *,
    which: OwnSwarm,
    overlap_s: Annotated[
        float | None,
        typer.Option(
            "--overlap",
            metavar="TIME",
            help="How long signatures of the old keys stay valid. Use `now` if a key was stolen.",
            show_default="as long as certificates last",
        ),
        From(str, lambda text: 0 if text == "now" else parse_duration_s(text)),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replace the authority keys with a new one. The swarm stays the same. Distribute its file
    again afterwards."""
    from swarmnet.swarm_file import writer as swarm_writer

    swarm = which.path
    if overlap_s is None:
        overlap_s = swarm_file.load(swarm).policy.certificate_lifetime_s
    now = wall_clock()
    file, key = swarm_writer.rotate_key(swarm, now=now, overlap_s=overlap_s)
    members.sign_revocations_anew(swarm, file, key, now)
    if as_json:
        print_json(_summary(file))
    else:
        print_text(f"{file.name} has a new authority key, serial {file.serial}: give the file out again")
        note(
            "issuers that run on this machine with this file load the new one, and members pass it to each other"
        )
        note("issuers elsewhere need the new file, and the new key unless they have one of their own")


def _summary(file: SwarmFile) -> dict[str, object]:
    authority = file.authority
    return {
        "name": file.name,
        "swarm_id": f"sha256:{file.swarm_id.hex()}",
        "open": file.is_open,
        "admission": str(file.admission),
        "serial": file.serial,
        "created": file.created.isoformat(),
        "not_after": file.not_after.isoformat() if file.not_after else None,
        "bootstrap": list(file.bootstrap),
        "mdns": file.mdns,
        "authority": [f"ed25519:{key.hex()}" for key in authority.keys] if authority else [],
        "issuers": [f"ed25519:{key.hex()}" for key in authority.issuers] if authority else [],
        "anyone": sorted(file.anyone),
        "members": {peer: sorted(roles) for peer, roles in file.allow.items()},
        "models": {model.name: f"sha256:{model.manifest.hex()}" for model in file.models},
        "pieces": {
            model.name: f"sha256:{model.pieces.hex()}" for model in file.models if model.pieces is not None
        },
        "trusted_hosts": list(file.hosts),
        "first_and_last": list(file.first_and_last),
        "certificate_lifetime_s": file.policy.certificate_lifetime_s,
        "revocation_refresh_s": file.policy.revocation_refresh_s,
        "quotas": {name: limit for name, limit in file.policy.quotas.to_dict().items() if limit is not None},
    }
