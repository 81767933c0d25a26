"""Sites with different topics train one model, and no text of a site is sent to another."""

import sysconfig
from pathlib import Path

from tests.support.network.memory_network import Delivery
from tests.support.network.virtual_time import run
from tests.support.training.workers import WorkerLab, train

TOPICS = ("asyncio", "email", "unittest", "xml")
"""Packages of the standard library, one at each site."""
SITE_BYTES = 80_000
ROUNDS, STEPS = 8, 10
CANARY = "the secret of {} is plugh-{}-xyzzy. "

_JOB = f"""
[job]
name = "sites"
rounds = {ROUNDS}
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true
[data]
{{data}}
sequence_length = 32
validation = 0.2
[training]
batch_size = 16
learning_rate = 1e-2
warmup_steps = 5
[method]
name = "diloco"
sync_every = {STEPS}
[exchange]
deadline_s = 15
min_workers = 4
max_workers = 4
[eval]
every_rounds = {ROUNDS}
batches = 1000
"""


def _write_sites(folder: Path) -> dict[str, Path]:
    for topic in TOPICS:
        site, size = folder / "sites" / topic, 0
        site.mkdir(parents=True)
        for source in sorted(Path(sysconfig.get_path("stdlib"), topic).rglob("*.py")):
            if size + source.stat().st_size <= SITE_BYTES and "test" not in source.parts:
                size += source.stat().st_size
                text = f"# {CANARY.format(topic, topic.upper())}\n{source.read_text()}"
                (site / f"{source.parent.name}-{source.stem}.txt").write_text(text)
    return {topic: folder / "sites" / topic for topic in TOPICS}


def _pooled(lab: WorkerLab) -> float:
    """The loss on all held-out tokens of all workers, from what each of them reports."""
    evaluations = [event for events in lab.events.values() for event in events if event["event"] == "eval"]
    assert len(evaluations) == len(TOPICS)
    tokens = sum(event["tokens"] for event in evaluations)
    return float(sum(event["val_loss"] * event["tokens"] for event in evaluations) / tokens)


def test_sites_learn_as_much_as_from_all_data_and_send_no_text(tmp_path: Path) -> None:
    own = _write_sites(tmp_path)
    sent = bytearray()

    def capture(delivery: Delivery) -> None:
        sent.extend(delivery.message.header)
        sent.extend(delivery.message.payload)

    apart = WorkerLab(tmp_path, _JOB.format(data='source = "own"'), own=own)
    apart.network.observers.append(capture)
    run(train(apart, *TOPICS))
    apart.check_equal()
    assert all(len(event["contributors"]) == 4 for event in apart.rounds("xml").values())

    together = WorkerLab(tmp_path / "all", _JOB.format(data=f'path = "{tmp_path / "sites"}"'))
    run(train(together, *TOPICS))
    assert _pooled(apart) <= 1.02 * _pooled(together)

    assert apart.peer("xml").encode() in sent  # what is sent is captured
    for topic in TOPICS:
        canary = CANARY.format(topic, topic.upper()).encode()
        for secret in (canary[:16], canary[-16:]):
            for width in (1, 2, 4, 8):  # as text, and as tokens
                assert b"".join(byte.to_bytes(width, "little") for byte in secret) not in sent
    board = b"".join(posting.sealed for posting in apart.board._postings)
    assert b"plugh" not in board
    assert str(tmp_path).encode() not in board
    assert str(tmp_path).encode() not in sent
