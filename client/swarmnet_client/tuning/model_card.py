"""The model card of an adapter: ``README.md`` as PEFT writes it and the hub shows it."""

import re
from collections.abc import Mapping
from typing import Any

from swarmnet_protocols.models.public_names import name_for_peers

CARD_FILE = "README.md"
_TITLES = {
    "method": "method",
    "learning_rate": "highest learning rate",
    "batch_size": "rows a step",
    "max_length": "most tokens a row",
    "rank": "rank",
    "alpha": "alpha",
    "target_modules": "modules",
    "virtual_tokens": "virtual tokens",
    "seed": "seed",
}


def model_card(summary: Mapping[str, Any]) -> str:
    """Return the card of the adapter that ``summary`` describes, the content of ``tune.json``. The
    card names no path of this machine."""
    from huggingface_hub import ModelCardData

    name = name_for_peers(summary["model"])
    is_classifier = bool(summary.get("labels"))
    about = ModelCardData(
        base_model=re.split("[@:]", name)[0] if "/" in name else None,  # only the hub's have a slash
        library_name="peft",
        pipeline_tag="text-classification" if is_classifier else "text-generation",
        tags=["swarmnet", *(["lora"] if "rank" in summary else [])],
    )
    rows = {
        "base model": name,
        "SHA-256 of its manifest": summary["manifest"],
        "training rows": summary["rows"],
        "held-out rows": summary["held_out_rows"],
        "SHA-256 of the data": ", ".join(summary["data"]),
        **{title: _shown(summary[key]) for key, title in _TITLES.items() if summary.get(key)},
        **({"classes": ", ".join(map(str, summary["labels"]))} if is_classifier else {}),
        "steps": len(summary["losses"]),
        "loss of the first and the last step": _ends(summary["losses"]),
    }
    if scores := [each["val_loss"] for each in summary["evaluations"]]:
        rows["held-out loss before and after"] = _ends(scores)
    table = "\n".join(f"| {title} | {_cell(value)} |" for title, value in rows.items())
    return (
        f"---\n{about.to_yaml()}\n---\n\n# An adapter for {name}\n\n"
        "PEFT loads this directory on the base model. It was trained with `swarmnet tune`: the base\n"
        "model's weights stayed frozen on the hosts of a swarm.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"{_use(name, summary)}\n"
        "Losses are in nats a token. `tune.json` has all of them.\n"
    )


def _use(name: str, summary: Mapping[str, Any]) -> str:
    if summary.get("labels"):
        return (
            "```python\nfrom peft import PeftModel\n"
            "from swarmnet import AutoSwarmModelForSequenceClassification as Model\n\n"
            f"with Model.from_pretrained({name!r}, num_labels={len(summary['labels'])}, swarm=SWARM) as model:\n"
            "    tuned = PeftModel.from_pretrained(model, DIRECTORY)\n```\n"
        )
    raw = "" if summary["has_chats"] else " --raw"
    return f'```sh\nswarmnet run {name} "YOUR QUESTION"{raw} --swarm SWARM --adapter DIRECTORY\n```\n'


def _shown(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _ends(losses: list[float]) -> str:
    return f"{losses[0]:.4f}, {losses[-1]:.4f}" if losses else "none"


def _cell(value: object) -> str:
    """Return a value as a cell of a table. Labels of rows may contain Markdown."""
    return " ".join(str(value).replace("\\", "\\\\").replace("|", "\\|").split())
