"""The events of ``tune`` as sentences."""

from swarmnet.cli.training.displays import Bar, Fields, Telling
from swarmnet.units import counted, show_size
from swarmnet_protocols.errors import how_to_add


class Words:
    """The events of one run as sentences, with the total of bytes so far."""

    def __init__(self) -> None:
        self._steps = 0
        self._sent = 0
        self._received = 0

    def tell(self, event: Fields) -> Telling:
        """Return the sentence of an event. Call it with every event of a run, in order."""
        sentence, kind = self._sentence(event), event["event"]
        bar = Bar("steps", event["step"], self._steps) if kind in {"begin", "step"} else None
        summary = sentence if kind == "step" else None
        return Telling(sentence, kind not in {"step", "saved"}, summary, bar)

    def _sentence(self, event: Fields) -> str:
        self._sent += event.get("bytes_sent", 0)
        self._received += event.get("bytes_received", 0)
        match event["event"]:
            case "begin":
                return self._beginning(event)
            case "step":
                text = (
                    f"step {event['step']} of {self._steps}: loss {event['loss']:.4f}, "
                    f"{event['tokens_per_s']:.0f} tokens/s, "
                    f"{show_size(self._sent)} sent, {show_size(self._received)} received"
                )
                lost = event["failovers"]
                return text + (f", {counted(lost, 'host')} replaced" if lost else "")
            case "eval":
                return f"step {event['step']}: held-out {_scores(event)}"
            case "saved":
                return f"saved after step {event['step']}"
            case "stopped":
                return f"stopped; the same command continues after step {event['step']}, which is saved"
            case "done":
                scores = f" Held-out {_scores(event)}." if "val_loss" in event else ""
                curve = "" if event["curve"] else f" No loss.png: {how_to_add('matplotlib')}."
                return f"done: the adapter is in {event['path']}.{scores}{curve}\nrun it: {event['run']}"
            case kind:
                raise ValueError(kind)

    def _beginning(self, event: Fields) -> str:
        self._steps = event["steps"]
        parts = [
            f"{event['method']}: {event['trained_parameters']:,} parameters, {counted(event['rows'], 'row')}, "
            f"{counted(event['steps'], 'step')}; held out for evaluation: {counted(event['held_out'], 'row')}"
        ]
        if event["cut"]:
            parts.append(f"cut off at --max-length: {counted(event['cut'], 'row')}")
        if event["step"]:
            parts.append(f"continuing after step {event['step']}")
        return "\n".join(parts)


def _scores(event: Fields) -> str:
    accuracy = f", accuracy {event['accuracy']:.1%}" if "accuracy" in event else ""
    return f"loss {event['val_loss']:.4f}{accuracy}"
