"""Chat templates are rendered as transformers does, within limits of time, memory and output."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from swarmnet_protocols.models.text import chat_template
from swarmnet_protocols.models.text.chat_template import TemplateFailed, TemplateRefused, render_chat
from tests.defences import defence, nothing, replacing

SAID = [{"role": "user", "content": "w5 \N{GRINNING FACE} \ud800"}, {"role": "assistant", "content": '"w6"'}]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{%- for m in messages %}\n  {{ m | tojson }}\n{%- endfor %}{% if add_generation_prompt %}go{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% continue %}"
    "{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]

SAYS = "{{ messages[0].content }}"


def of(template: str) -> Any:
    return SimpleNamespace(get_chat_template=lambda: template, special_tokens_map={"bos_token": "<s>"})


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_template_renders_as_in_transformers(template: str, add_generation_prompt: bool) -> None:
    usual, _ = render_jinja_template(
        [SAID], chat_template=template, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    assert [render_chat(of(template), SAID, add_generation_prompt=add_generation_prompt)] == usual


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no \x1b[2J system') }}", r"no  \[2J system"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_the_error_of_a_template_is_reported(template: str, why: str) -> None:
    with pytest.raises(TemplateRefused, match=why):
        render_chat(of(template), SAID, add_generation_prompt=True)


def rendering_in_process(patch: pytest.MonkeyPatch) -> None:
    def ask(_: object, request: bytes, _max_bytes: int) -> dict[str, str]:
        fields = chat_template.json.loads(request)
        (text,), _ = render_jinja_template([fields["messages"]], chat_template=fields["template"])
        return {"text": text}

    patch.setattr(chat_template._Renderer, "request", ask)


@defence("a chat template has a memory limit", off=rendering_in_process)
def test_a_template_is_stopped_at_its_memory_limit() -> None:
    with pytest.raises(TemplateFailed, match="memory"):
        render_chat(of("{% set x = 'a' * 200000000 %}{{ x | length }}"), SAID, add_generation_prompt=True)
    assert render_chat(of(SAYS), SAID, add_generation_prompt=True) == SAID[0]["content"]


IN_PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}part{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


def test_a_template_that_loops_over_parts_gets_parts() -> None:
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " user "}]
    text = render_chat(of(IN_PARTS), said, add_generation_prompt=True)
    assert text == "system: Be kind.user:  user "
    assert render_chat(of(EITHER), said[1:], add_generation_prompt=True) == " user "


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m['role'] }}>{% endfor %}",
        "{{ messages[0]['content'] }}",
        "{% for m in messages %}{% if 'b' not in m['content'] %}{{ m['content'] }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_leaves_out_what_the_user_wrote_is_refused(template: str) -> None:
    said = [{"role": "user", "content": "user"}, {"role": "user", "content": "b"}]
    with pytest.raises(TemplateRefused, match="leaves out the text of message"):
        render_chat(of(template), said, add_generation_prompt=True)


@defence("a chat template has an output limit", off=rendering_in_process)
def test_a_template_is_stopped_at_its_output_limit() -> None:
    with pytest.raises(TemplateFailed, match="1000 characters"):
        render_chat(of("{{ 'a' * 1001 }}"), SAID, add_generation_prompt=True, max_chars=1000)


def loops(count: int) -> str:
    return f"{{% for a in range({count}) %}}{{% for b in range({count}) %}}{{% endfor %}}{{% endfor %}}"


@defence("a chat template has a time limit", off=rendering_in_process, limit="RENDER_S")
@pytest.mark.parametrize(
    ("limit", "value", "template"), [("CPU_S", 0, loops(90_000)), ("RENDER_S", 0.1, loops(3000))]
)
def test_a_template_is_stopped_at_its_time_limit(
    limit: str, value: float, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    render_chat(of(SAYS), SAID, add_generation_prompt=True)
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, limit, value)
        with pytest.raises(TemplateFailed, match="cannot be rendered"):
            render_chat(of(template), SAID, add_generation_prompt=True)
    assert render_chat(of(SAYS), SAID, add_generation_prompt=True) == SAID[0]["content"]


WITHOUT_KERNEL_LIMITS = """
import resource, runpy
resource.setrlimit = lambda *_: None
runpy.run_path({program!r}, run_name="__main__")
"""
"""A platform without resource limits, such as Windows."""
WASTEFUL = {
    "processor": loops(3000),
    "memory": "{% set x = 'a' * 300000000 %}" + loops(1500),
}


@defence(
    "a chat template is limited where the kernel limits nothing",
    off=replacing(chat_template, "_kill_beyond", nothing),
    resource="memory",
)
@pytest.mark.parametrize("resource", WASTEFUL)
def test_a_template_is_stopped_without_limits_of_the_kernel(
    resource: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(WITHOUT_KERNEL_LIMITS.format(program=str(chat_template._PROGRAM)))
    renderer = chat_template._Renderer()
    monkeypatch.setattr(chat_template, "_PROGRAM", script)
    monkeypatch.setattr(chat_template, "_renderer", renderer)
    try:
        render_chat(of(SAYS), SAID, add_generation_prompt=True)
        with monkeypatch.context() as patch:
            patch.setattr(chat_template, "CPU_S", 0.1 if resource == "processor" else 50)
            with pytest.raises(TemplateFailed, match="takes more than"):
                render_chat(of(WASTEFUL[resource]), SAID, add_generation_prompt=True)
        assert render_chat(of(SAYS), SAID, add_generation_prompt=True) == SAID[0]["content"]
    finally:
        renderer.stop()


def with_full_environment(patch: pytest.MonkeyPatch) -> None:
    def popen(*arguments: Any, **options: Any) -> Any:
        return started(*arguments, **options | {"env": None})

    started = chat_template.subprocess.Popen
    patch.setattr(chat_template.subprocess, "Popen", popen)


@defence("chat templates have no secrets", off=with_full_environment)
def test_the_environment_is_hidden_from_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNET_API_KEY", "correct-horse")
    renderer = chat_template._Renderer()
    try:
        renderer.prepare()
        assert renderer._process is not None
        file, environment = Path(f"/proc/{renderer._process.pid}/environ"), b""
        # Linux shows it a moment after the program has replaced that of this process
        while not environment:
            environment = file.read_bytes()
        assert b"correct-horse" not in environment
    finally:
        renderer.stop()


def test_invalid_replies_of_the_process_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    for says in (b"\xff\xff\xff\xff", b"\0\0\0\2[]", b'\0\0\0\7{"a":1}', b""):
        script.write_text(f"import sys\nsys.stdout.buffer.write({says!r})\n")
        monkeypatch.setattr(chat_template, "_PROGRAM", script)
        renderer = chat_template._Renderer()
        with pytest.raises(TemplateFailed, match="did not start"):
            renderer.request(b"{}", 100)
