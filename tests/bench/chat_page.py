"""How long a browser needs until the chat is on the screen, and its longest frame while a
conversation of 10,000 tokens scrolls: ``python -m tests.bench.chat_page``.

Real Chromium without a GPU, a fresh profile each time, the endpoint in the same machine. Prints one
JSON object.
"""

import argparse
import json
import statistics

from tests.support.dashboard.site import chromium
from tests.support.processes.scripted_endpoint import ScriptedEndpoint, said, scripted

TURNS = 25
ANSWER = """A paragraph of an answer with **bold** words and `code` in it, which wraps over lines.

```python
def double(number):
    return number + number
```

1. one thing
2. another thing

| a | b |
|---|---|
| 1 | 2 |

"""
PARTS = 6
"""Parts of an answer, each of about 70 tokens."""
PAINTED = """new Promise(done => new PerformanceObserver((_, watch) => {
    const [first] = performance.getEntriesByName('first-contentful-paint');
    if (first) { watch.disconnect(); done(first.startTime); }
}).observe({ type: 'paint', buffered: true }))"""
STORE = """messages => {
    localStorage.setItem('swarmnet.chats', JSON.stringify([{ id: 'a', title: 'Long', at: 1, chars: 1 }]));
    localStorage.setItem('swarmnet.chat.a', JSON.stringify({ id: 'a', title: 'Long', messages }));
}"""
SCROLL = """() => new Promise(done => {
    const main = document.getElementById('main'), frames = [];
    let before = performance.now();
    main.scrollTop = 0;
    requestAnimationFrame(function next(now) {
        frames.push(now - before);
        before = now;
        main.scrollTop += 120;
        if (main.scrollTop + main.clientHeight < main.scrollHeight - 2) requestAnimationFrame(next);
        else done(frames.slice(1));
    });
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    painted_s, longest_s, frames = [], [], 0
    with scripted(ScriptedEndpoint([said("Hello")])) as endpoint, chromium() as browser:
        for _ in range(arguments.runs):
            context = browser.new_context()
            page = context.new_page()
            page.goto(endpoint.url)
            painted_s.append(page.evaluate(PAINTED) / 1000)
            page.evaluate(STORE, _conversation())
            page.reload()
            page.get_by_role("button", name="Long", exact=True).click()
            found = page.evaluate(SCROLL)
            longest_s.append(max(found) / 1000)
            frames = len(found)
            context.close()
    figures = {
        "runs": arguments.runs,
        "first_paint_s": {
            "median": round(statistics.median(painted_s), 3),
            "worst": round(max(painted_s), 3),
        },
        "frames": frames,
        "longest_frame_s": {
            "median": round(statistics.median(longest_s), 3),
            "worst": round(max(longest_s), 3),
        },
    }
    print(json.dumps(figures))


def _conversation() -> list[dict[str, object]]:
    figures = {"tokens": 400, "trips": 400, "first_s": 0.1, "whole_s": 4}
    answer = {"role": "assistant", "content": PARTS * ANSWER, "reason": "stop", "figures": figures}
    return [each for turn in range(TURNS) for each in ({"role": "user", "content": f"{turn}?"}, answer)]


if __name__ == "__main__":
    main()
