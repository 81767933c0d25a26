"""A chat: its requests to the swarm, its memory, its commands. A tiny model runs on tiny nodes in
this process."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from swarmnet.cli.chat.answering import ModelAnswerer
from swarmnet.cli.chat.conversation import Conversation, Turn
from swarmnet.cli.chat.generation import SamplingOptions, Screen
from swarmnet.cli.chat.loop import Chat, changed
from swarmnet_protocols.errors import ConfigError, NoRoute
from tests.support.models.tiny import VOCABULARY
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import TinySwarm, load_tiny, tiny_swarm

TEMPLATE = "{% for m in messages %}{{ {'user': 'w10 ', 'assistant': 'w11 ', 'system': 'w12 '}[m.role] + m.content + ' ' }}{% endfor %}w11"
TALK = SamplingOptions(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(reference: Reference) -> Iterator[TinySwarm]:
    with tiny_swarm(reference) as running:
        running.model.generation_config.eos_token_id = None
        running.model.tokenizer = words()
        yield running


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of the words ``w0`` to ``w96``, without special tokens: decoded ids are encoded
    to the same ids."""
    known = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    known.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known)


@contextmanager
def chatting(tiny: TinySwarm, sampling: SamplingOptions = TALK, **options: Any) -> Iterator[Chat]:
    tiny.model.tokenizer.chat_template = options.pop("template", TEMPLATE)
    said = Conversation(tiny.model.tokenizer, options.pop("context", 512), **options)
    chat = Chat(ModelAnswerer(tiny.model), said, sampling, Screen(as_json=True))
    with chat._session:
        chat._session.enter_context(tiny.model.session())
        yield chat


def answers(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_second_message_does_not_compute_the_first_again(
    tiny: TinySwarm, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting(tiny) as chat:
        chat.take("w20 w21 w22 w23 w24 w25 w26")
        before = tiny.status.host.positions
        chat.take("w30")
        computed = tiny.status.host.positions - before
    first, second = answers(capsys)
    ids = [10, *range(20, 27), 11]
    assert first["token_ids"] == reference.greedy(ids, 6)
    ids += [*first["token_ids"], 10, 30, 11]
    assert second["prompt_tokens"] == len(ids)
    assert second["token_ids"] == reference.greedy(ids, 6)
    # The last token of the first answer, four more of the prompt at most, and all but one of the
    # second answer.
    assert computed <= 1 + 3 + 5


def test_without_a_template_the_text_goes_on(
    tiny: TinySwarm, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting(tiny, template=None) as chat:
        chat.take("w20 w21 ")
        chat.take(" w30")
    first, second = answers(capsys)
    assert first["token_ids"] == reference.greedy([20, 21], 6)
    assert second["token_ids"] == reference.greedy([20, 21, *first["token_ids"], 30], 6)


def test_ctrl_c_stops_the_answer_and_what_came_is_kept(
    tiny: TinySwarm, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient(Screen):
        def show(self, piece: str) -> None:
            if piece.startswith("w"):
                signal.raise_signal(signal.SIGINT)

    with chatting(tiny) as chat:
        chat._screen = Impatient(as_json=True)
        with pytest.raises(KeyboardInterrupt):
            chat.take("w20")
        chat._screen = Screen(as_json=True)
        assert chat.conversation.turns[0].answer
        chat.take("w30")
    stopped, second = answers(capsys)
    assert len(stopped["token_ids"]) < 6
    ids = [10, 20, 11, *stopped["token_ids"], 10, 30, 11]
    assert second["token_ids"] == reference.greedy(ids, 6)


def test_a_full_context_forgets_the_oldest_and_says_so(
    tiny: TinySwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting(tiny, context=48) as chat:
        said: list[str] = []
        for number in range(20, 26):
            chat.take(f"w{number} w{number} w{number}")
            said.append(capsys.readouterr().err)
        questions = [turn.question for turn in chat.conversation.turns]
    assert [number for number, text in enumerate(said) if "forgot" in text]
    assert questions[-1] == "w25 w25 w25"
    assert "w20 w20 w20" not in questions


def test_after_a_failure_the_question_can_be_asked_again(
    tiny: TinySwarm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def session(_: object) -> Any:
        opened.append("again")
        return nullcontext()

    def unexpected(*_: object, **__: object) -> None:
        raise NoRoute([(0, 2)])

    with chatting(tiny) as chat:
        with monkeypatch.context() as patch:
            patch.setattr(ModelAnswerer, "session", session)
            patch.setattr(type(tiny.model), "generate", unexpected)
            with pytest.raises(NoRoute):
                chat.take("w20")
        assert (chat.conversation.turns, opened) == ([], ["again"])
        chat.take("/retry")
        assert [turn.question for turn in chat.conversation.turns] == ["w20"]
    assert len(answers(capsys)) == 1


def test_a_stopped_or_failed_answer_is_tried_again_in_its_place(
    tiny: TinySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Screen):
        def show(self, piece: str) -> None:
            if piece.startswith("w"):
                signal.raise_signal(signal.SIGINT)

    def unexpected(*_: object, **__: object) -> None:
        raise NoRoute([(0, 2)])

    def questions() -> list[str]:
        return [turn.question for turn in chat.conversation.turns]

    with chatting(tiny) as chat:
        chat.take("w20")
        chat._screen = Impatient(as_json=True)
        with pytest.raises(KeyboardInterrupt):
            chat.take("w30")
        chat._screen = Screen(as_json=True)
        chat.take("/retry")
        assert questions() == ["w20", "w30"]
        with monkeypatch.context() as patch:
            patch.setattr(type(tiny.model), "generate", unexpected)
            with pytest.raises(NoRoute):
                chat.take("/retry")
        chat.take("/retry")
        assert questions() == ["w20", "w30"]


def test_undo_retry_and_clear_change_the_conversation(
    tiny: TinySwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting(tiny) as chat:
        for text in ("w20", "w30", "/retry", "/undo"):
            chat.take(text)
        first, second, again = answers(capsys)
        assert second["token_ids"] == again["token_ids"]
        assert chat.conversation.turns == [Turn("w20", first["text"])]
        chat.take("/clear")
        assert chat.conversation.turns == []
        for empty in ("/undo", "/retry"):
            with pytest.raises(typer.BadParameter, match="no message yet"):
                chat.take(empty)


def test_route_stats_help_and_settings_are_told(tiny: TinySwarm, capsys: pytest.CaptureFixture[str]) -> None:
    with chatting(tiny) as chat:
        with pytest.raises(typer.BadParameter, match="no answer yet"):
            chat.take("/route")
        for text in ("w20", "/route", "/stats", "/help", "/set top_p 0.5", "/set system w40", "/set"):
            chat.take(text)
        told = capsys.readouterr().err
        assert chat.sampling == SamplingOptions(max_new_tokens=6, temperature=0.0, top_p=0.5)
        assert chat.conversation.messages()[0] == {"role": "system", "content": "w40"}
    for words in ("0:2", "2:4", "4:6", "1 answer, 6 tokens", " sent, ", "/save FILE", "seed = another one"):
        assert words in told


def test_saving_a_conversation_does_not_overwrite_a_file(tiny: TinySwarm, tmp_path: Path) -> None:
    with chatting(tiny) as chat:
        chat.conversation.turns = [Turn("hello", "hi")]
        chat.take(f"/save {tmp_path}/talk.json")
        chat.take(f"/save {tmp_path}/talk.md")
        with pytest.raises(typer.BadParameter, match="exists"):
            chat.take(f"/save {tmp_path}/talk.md")
        with pytest.raises(typer.BadParameter, match="say where"):
            chat.take("/save")
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in messages] == ["hello", "hi"]
    assert (tmp_path / "talk.json").stat().st_mode & 0o777 == 0o600
    assert "**assistant**\n\nhi" in (tmp_path / "talk.md").read_text()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("colour", "1", "no setting colour"),
        ("temperature", "warm", "takes a number"),
        ("temperature", "-1", "0 or more"),
        ("temperature", "nan", "0 or more"),
        ("top_p", "0", "above 0"),
        ("max_new_tokens", "0", "at least"),
        ("seed", "1.5", "takes a number"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        changed(TALK, name, value)


def test_settings_change_one_at_a_time() -> None:
    assert changed(TALK, "temperature", "0.5") == SamplingOptions(max_new_tokens=6, temperature=0.5)
    assert changed(SamplingOptions(seed=3), "seed", "default") == SamplingOptions()


def test_an_unknown_command_is_not_sent_as_a_message(
    tiny: TinySwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    with chatting(tiny) as chat:
        with pytest.raises(typer.BadParameter, match="/bogus"):
            chat.take("/bogus")
        assert chat.conversation.turns == []
        chat.take("//w20")
        assert chat.conversation.turns[0].question == "/w20"


def test_the_chat_reports_which_host_took_over(
    tiny: TinySwarm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tiny.model.generate

    def one_host_leaves(*arguments: Any, **options: Any) -> Any:
        result = answer(*arguments, **options)
        tiny.model.last_run.failovers, tiny.model.last_run.longest_stall_s = 1, 0.3
        tiny.model.last_run.route = [("spare-12345678", 0, 6)]
        return result

    with chatting(tiny) as chat:
        chat.take("w20")
        assert "a host left" not in capsys.readouterr().err
        monkeypatch.setattr(tiny.model, "generate", one_host_leaves)
        chat.take("w30")
        assert "a host left; continued on …12345678 (0:6) after 0.3 s" in capsys.readouterr().err


def test_a_template_that_refuses_says_what_to_do(tiny: TinySwarm) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}w1"
    with (
        chatting(tiny, template=refusing, system="w5") as chat,
        pytest.raises(ConfigError, match="no system"),
    ):
        chat.take("w20")
