"""The real vocabularies in llama.cpp's source: each has llama.cpp's ids and ends, or is refused.

``test_gguf_tokenizer.py`` shows the same with small vocabularies.
"""

import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from swarmnet_protocols.models.text.end_tokens import end_ids
from tests.support.gguf.witness import SOURCE, ids_and_ends, needs_llama_cpp

VOCABULARIES = (
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon"),
    *("gemma-4", "gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)
REFUSED = {"bert-bge", "nomic-bert-moe"}
"""Vocabularies of embedding models."""
BETWEEN = "\n__ggml_vocab_test__\n"
"""What separates llama.cpp's own texts."""
LINES = 2000
CHATS = 60
PROSE = """
Alle Menschen sind frei und gleich an Würde und Rechten geboren; „so“ — 1.234,56 €. Im Jahr 2024
Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi. Cửa Việt, Việt Nam.
Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وقد وهبوا عقلًا وضميرًا. ٣ كتب؟
כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। १२३
மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; அவர்கள் சமமானவர்கள்.
มนุษย์ทั้งปวงเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ๑๒๓
人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。２０２４年
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。ｶﾀｶﾅ
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. ㅋㅋㅋ
ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.
የሰው፡ልጅ፡ሁሉ፡ሲወለድ፡ነጻና፡በክብርና፡በመብትም፡እኩልነት፡ያለው፡ነው።
👩‍👩‍👧‍👦 🦙🦙 ✅ 🇩🇪 ½ x² ﬁ e\u0301 a\u0308 \u200b\u00a0\u3000\ufeff ⅷ ① I'LL can't WE'Ve 'tis he’s 'S 'Llama
 a  b   c\t\td\n\n\ne \r\n f\u2003g  \n   h    1 12 123 1234 12345 0x7f 1,000,000 2024-11-26
"""

pytestmark = [pytest.mark.thorough, needs_llama_cpp]


def code() -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    lines = (library / "argparse.py").read_text() + (library / "turtle.py").read_text()
    return "".join(lines.splitlines(keepends=True)[:LINES])


def chats(tokenizer: Any) -> str:
    """Special tokens among words and spaces."""
    draw = random.Random(1)
    special = [each.content for each in tokenizer.added_tokens_decoder.values()]
    words = ["user", "\n", " ", "Hello, how are you?", "\n\n", "  two", "你好", "x", "\t", " '", "3", "<b>"]
    return "".join(draw.choice(words) + draw.choice([*special, ""]) for _ in range(CHATS * 10))


def test_every_real_vocabulary_is_tested() -> None:
    found = SOURCE.joinpath("models").glob("ggml-vocab-*.gguf")
    assert sorted(path.stem.removeprefix("ggml-vocab-") for path in found) == sorted(VOCABULARIES)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_real_vocabulary_has_the_ids_and_ends_of_llama_cpp(vocabulary: str, tmp_path: Path) -> None:
    path = SOURCE / "models" / f"ggml-vocab-{vocabulary}.gguf"
    checkpoint = GgufCheckpoint([path], tmp_path / "metadata")
    if vocabulary in REFUSED:
        with pytest.raises(ConfigError, match="are not read"):
            checkpoint.tokenizer()
        return
    tokenizer: Any = checkpoint.tokenizer()

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    own = path.with_suffix(".gguf.inp")
    texts = own.read_bytes().decode().removesuffix(BETWEEN).split(BETWEEN) if own.exists() else []
    known = own.with_suffix(".out").read_text().splitlines() if texts else []
    assert [" ".join(map(str, ids(text))) for text in texts] == [line.strip() for line in known]
    for text in (code(), PROSE, chats(tokenizer)):
        expected, ends = ids_and_ends(path, text)
        assert ids(text) == expected
    # llama.cpp also ends at an </s> that is HTML: generate does not.
    html = {id for id in ends if tokenizer.convert_ids_to_tokens(id) == "</s>"} - {*checkpoint.end_ids}
    found = end_ids(tokenizer, checkpoint.end_ids, len(tokenizer))
    assert {*ends} - html <= {*found} <= {*ends}
