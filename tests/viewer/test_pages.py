"""The pages in a browser: headless Chromium and its driver from the system's packages."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mrlm_pl.durable_files import write_json
from mrlm_pl.episode import Message, Origin, ToolCall
from mrlm_pl.episode_files import iteration_file, write_lines
from mrlm_pl.runs.state import write_state
from mrlm_pl.viewer.export import export_page
from mrlm_pl.viewer.runs import Run, demonstration, find_runs
from mrlm_pl.viewer.server import application
from tests.support.runs.recorded_runs import CONFIGURATION, HOSTILE, episode, with_credit, write_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="there is no chromedriver; .ci/run installs it"),
]

SCREENSHOTS = os.environ.get("MRLM_SCREENSHOTS")
"""Folder for the pictures of the documents; unset takes none."""

READY = "return document.getElementById('main').dataset.ready === location.hash"
A, B, TREE = "debate-seed0", "debate-seed1", "debate-turn-tree"
VIEWS = {
    "runs": "#runs",
    "run": f"#run?run={A}",
    "curves": '#curves?runs=["debate-seed0","debate-seed1"]',
    "episodes": f"#episodes?run={A}",
    "episode": f"#episode?run={A}&id=3-1-0",
    "tokens": f"#tokens?run={A}&id=3-1-0&agent=pro&by=entropy",
    "group": f"#group?run={A}&group=3-1&iteration=3",
    "credit": f"#credit?run={TREE}&id=2-1-1-1-1-1",
    "compare": f"#compare?run={A}&other={B}",
    "pair": f"#pair?run={A}&id=3-1-0&other={B}&second=3-1-0",
    "health": f"#health?run={A}",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    arguments = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --window-size=1360,860"
    for argument in arguments.split():
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[[dict[str, Run]], str]]:
    """Return a function that serves runs from a thread and returns their address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(runs: dict[str, Run]) -> int:
        runner = web.AppRunner(application(runs))
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(runner.addresses[0][1])

    def serve(runs: dict[str, Run]) -> str:
        return f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(runs), loop).result(100)}/"

    yield serve
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(100)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="module")
def demo(served: Any) -> str:
    """Return the address of the demonstration."""
    return served(demonstration())


def wait(browser: Any, script: str, *arguments: Any) -> Any:
    """Return the value of a script as soon as it is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 100, 0.05).until(lambda driver: driver.execute_script(script, *arguments))


def show(browser: Any, address: str) -> str:
    """Open an address in a new document, and return the text of the page without errors in the console."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(address)
    wait(browser, READY)
    assert browser.get_log("browser") == []
    return str(browser.execute_script("return document.body.textContent"))


def rows(browser: Any) -> int:
    return int(browser.execute_script("return document.querySelectorAll('tbody tr').length"))


def count(browser: Any) -> str:
    return str(browser.execute_script("return document.getElementById('count').textContent"))


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_opens_without_an_error(view: str, browser: Any, demo: str) -> None:
    text = show(browser, demo + VIEWS[view])
    assert browser.execute_script("return document.querySelector('.warning')") is None, text
    assert browser.execute_script("return document.querySelector('h1').textContent")
    if SCREENSHOTS:
        bottom = browser.execute_script("return document.getElementById('main').getBoundingClientRect().bottom")
        size = {
            "width": 1360,
            "height": int(bottom) if bottom <= 1000 else 717,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        browser.save_screenshot(str(Path(SCREENSHOTS) / f"{view}.png"))
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_run_shows_its_main_curves_and_opens_its_configuration_without_any(
    browser: Any, served: Any, tmp_path: Path
) -> None:
    logged = write_run(tmp_path / "logged", [[episode("0-0")]], rewards=[0.5, 0.25])
    silent = write_run(tmp_path / "silent", [[episode("0-0")]])
    url = served(find_runs([str(logged), str(silent)]))
    facts = "return [document.querySelectorAll('figure').length, document.querySelector('details').open]"
    for folder, expected in ((logged, [1, False]), (silent, [0, True])):
        assert "class_path: mrlm_pl.GRPO" in show(browser, f"{url}#run?run={folder}")
        assert browser.execute_script(facts) == expected


def test_curves_of_two_seeds_have_a_band(browser: Any, demo: str) -> None:
    show(browser, demo + VIEWS["curves"] + "&filter=rollout/reward")
    count = "return document.querySelectorAll('{}').length"
    assert browser.execute_script(count.format("figure")) == 1
    assert browser.execute_script(count.format("polyline.thin")) == 2
    assert browser.execute_script(count.format("polygon.band")) == 1


def test_curves_of_reward_components_and_callbacks_come_before_constant_ones(browser: Any, demo: str) -> None:
    show(browser, demo)
    columns: dict[str, list[Any]] = {
        "lab/number": [1, 2, None],
        "rollout/agent/con/components/evidence": [0.1, 0.2, 0.3],
        "rollout/agent/con/reward": [0.5, 0.6, 0.8],
        "rollout/debate/evidence": [0.1, 0.2, 0.3],
        "rollout/debate/tie": [0, 0, None],
        "rollout/response_tokens": [8, 8, 8],
        "rollout/reward": [0.5, 0.6, 0.7],
        "rollout/stop/judged": [0.9, 1, 1],
        "step": [0, 1, 2],
        "train/approx_kl": [1e-13, -2e-13, None],
        "train/learning_rate": [3, 2, 1],
    }
    script = """const [columns, done] = arguments;
    import('/curves.js').then((module) => done(module.chosenNames(Object.keys(columns).sort(), [{ columns }])))"""
    assert browser.execute_async_script(script, columns) == [
        *("rollout/reward", "rollout/agent/con/reward", "lab/number", "rollout/debate/evidence"),
        *("rollout/response_tokens", "train/approx_kl", "rollout/debate/tie"),
    ]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.99985, 1], ["0.99985", "0.9999", "0.99995", "1"]),
        ([0, 3.9e7], ["0", "1e7", "2e7", "3e7"]),
        ([12345670, 12345680], ["12345670", "12345672", "12345674", "12345676", "12345678", "12345680"]),
        ([0.1, 85.9], ["20", "40", "60", "80"]),
    ],
)
def test_the_ticks_of_a_chart_differ_and_are_whole(
    values: list[float], texts: list[str], browser: Any, demo: str
) -> None:
    show(browser, demo)
    script = """const [[first, last], done] = arguments;
    import('/chart.js').then(({ chart }) => {
      const figure = chart('x', [{ name: 'x', points: [[0, first], [150, last]], color: 0 }]);
      document.body.append(figure);
      const edge = figure.querySelector('svg').getBoundingClientRect();
      const ticks = [...figure.querySelectorAll('.tick')], boxes = ticks.map((tick) => tick.getBoundingClientRect());
      const whole = boxes.every((box) => box.left >= edge.left && box.right <= edge.right);
      done({ texts: ticks.map((tick) => tick.textContent), whole });
    })"""
    found = browser.execute_async_script(script, values)
    assert found == {"texts": [*texts, "0", "50", "100", "150"], "whole": True}


@pytest.mark.parametrize(("last", "texts"), [(4, ["1", "2", "3", "4"]), (2.5, ["1", "1.5", "2", "2.5"])])
def test_ticks_of_iterations_are_whole(last: float, texts: list[str], browser: Any, demo: str) -> None:
    show(browser, demo)
    script = """const [last, done] = arguments;
    import('/chart.js').then(({ chart }) => {
      const figure = chart('x', [{ name: 'x', points: [[1, 0], [last, 0]], color: 0 }]);
      const ticks = [...figure.querySelectorAll('.tick')].filter((tick) => tick.getAttribute('y') === '192');
      done(ticks.map((tick) => tick.textContent));
    })"""
    assert browser.execute_async_script(script, last) == texts


def with_learning_rate(rate: float) -> dict[str, Any]:
    policies = {"main": {"model": "builtin:tiny", "learning_rate": rate}}
    return {**CONFIGURATION, "model": {"class_path": "mrlm_pl.GRPO", "init_args": {"policies": policies}}}


def test_more_families_than_colors_are_told_apart(browser: Any, served: Any, tmp_path: Path) -> None:
    for number in range(7):
        write_run(tmp_path / f"run{number}", [], with_learning_rate(number), rewards=[0.1, 0.2])
    show(browser, f"{served(find_runs([str(tmp_path)]))}#curves?filter=rollout/reward")
    for element in ("polyline", ".swatch"):
        looks = (
            f"return [...document.querySelectorAll('{element}')].map((one) => one.className.baseVal ?? one.className)"
        )
        assert len(set(browser.execute_script(looks))) == 7


def test_numbers_that_no_line_shows_are_counted_in_the_title(browser: Any, served: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [], rewards=[0.1, math.nan, 0.2])
    show(browser, f"{served(find_runs([str(tmp_path)]))}#curves?filter=rollout/reward")
    title = browser.execute_script("return document.querySelector('figcaption').textContent")
    assert title == "rollout/reward (1 NaN or infinite)"


def test_no_view_is_wider_than_a_phone(browser: Any, served: Any, tmp_path: Path) -> None:
    for name in ("long-name-" * 12 + "x" * 80, "other"):
        write_run(tmp_path / name, [[episode("0-0", "word" * 200)]], rewards=[0.1, 0.2])
    runs = find_runs([str(tmp_path)])
    long, other = runs
    address = served(runs)
    size = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for view in VIEWS:
            show(browser, f"{address}#{view}?run={long}&id=0-0&group=0&other={other}&second=0-0")
            assert browser.execute_script(
                "const page = document.documentElement; return page.scrollWidth === page.clientWidth"
            ), view
        show(browser, f"{address}#episodes?run={other}")
        lines = (
            "const cell = document.querySelectorAll('td')[2]; return cell.querySelector('bdi').getClientRects().length"
        )
        assert browser.execute_script(lines) == 1, "the name of a task is not broken into letters"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_back_button_returns_to_the_row(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode(f"0-{number}") for number in range(90)]])
    show(browser, f"{served(find_runs([str(folder)]))}#episodes?run={folder}")
    browser.execute_script("scrollTo(0, 700)")
    wait(browser, "return history.state === 700")
    browser.execute_script("document.querySelectorAll('tbody a')[60].click()")
    wait(browser, f"return location.hash.startsWith('#episode?') && {READY.removeprefix('return ')}")
    assert browser.execute_script("return scrollY") == 0
    browser.back()
    wait(browser, "return scrollY === 700")


def test_a_key_that_changes_a_view_leaves_the_focus(browser: Any, demo: str) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, f"{demo}#episodes?run={A}")
    browser.find_element("xpath", "//th/button[text()='reward']").send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.text == "reward ▼"
    show(browser, demo + VIEWS["tokens"])
    browser.find_elements("css selector", "select")[1].send_keys(Keys.ARROW_UP)
    wait(browser, "return !location.hash.includes('by=entropy') && document.activeElement.tagName === 'SELECT'")


@pytest.fixture
def manual_refresh(browser: Any) -> Iterator[None]:
    """Give the pages that a test opens their refresh as `refresh()` instead of a timer."""
    source = {"source": "window.setInterval = (call) => { window.refresh = call; }"}
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    yield
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@pytest.mark.usefixtures("manual_refresh")
def test_the_first_refresh_shows_what_changed_since_the_page_opened(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0")]], rewards=[0.5])
    show(browser, served(find_runs([str(folder)])))
    wait(browser, "return !!window.refresh")
    write_state(folder, {"state": "failed"})
    browser.execute_script("refresh()")
    wait(browser, "return document.querySelector('main').textContent.includes('failed')")


@pytest.mark.usefixtures("manual_refresh")
def test_overlapping_refreshes_keep_a_table_where_it_was_scrolled(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0")]], rewards=[0.5])
    size = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        show(browser, served(find_runs([str(folder)])))
        wait(browser, "return !!window.refresh")
        browser.execute_script("document.querySelector('.scroll').scrollLeft = 150")
        write_state(folder, {"state": "failed"})
        refreshes = "Promise.all(Array.from({ length: 20 }, () => refresh())).then(arguments[0])"
        browser.execute_async_script(refreshes)
        shown = "return [document.querySelector('main').textContent.includes('failed'), {}]"
        assert browser.execute_script(shown.format("document.querySelector('.scroll').scrollLeft")) == [True, 150]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.usefixtures("manual_refresh")
def test_a_viewer_that_has_ended_is_said(browser: Any, demo: str) -> None:
    show(browser, demo)
    wait(browser, "return !!window.refresh")
    browser.execute_script(
        "window.answers = fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); refresh()"
    )
    said = "return document.querySelector('{}')?.textContent === '{}'"
    assert wait(browser, said.format("[role=status]", "the viewer does not answer: start `mrlm view` again"))
    browser.execute_script("document.querySelector('main a').click()")
    assert wait(browser, said.format("[role=alert]", "the viewer does not answer: start `mrlm view` again"))
    browser.execute_script("window.fetch = window.answers; refresh()")
    assert wait(browser, said.format("[role=status]", ""))


def test_a_command_is_selected_where_the_browser_offers_no_clipboard(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    show(browser, f"{served(find_runs([str(folder)]))}#run?run={folder}")
    browser.execute_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    browser.find_element("css selector", ".command button").click()
    assert wait(browser, f"return getSelection().toString() === 'mrlm eval --model {folder}'")


def test_heads_of_numbers_stand_over_them(browser: Any, demo: str) -> None:
    show(browser, demo)
    heads = "return [...document.querySelectorAll('th.number')].map((head) => head.textContent)"
    assert browser.execute_script(heads) == ["last reward [95 %]", "iterations", "episodes"]


def test_a_band_is_the_interval_of_student(browser: Any, demo: str) -> None:
    show(browser, demo)
    script = """const done = arguments[arguments.length - 1];
    import('/curves.js').then((module) => done(module.band([[[1, 1.0]], [[1, 2.0]], [[1, 3.0]]], [12.706, 4.303])))"""
    found = browser.execute_async_script(script)
    assert found["mean"] == [[1, 2]]
    # 4.303 times the standard error sqrt(1 / 3) with two degrees of freedom
    assert found["interval"][0] == pytest.approx([1, 2 - 2.48434, 2 + 2.48434], abs=1e-4)


def test_a_wide_band_leaves_half_of_the_chart_to_its_lines(browser: Any, demo: str) -> None:
    show(browser, demo)
    script = """const done = arguments[arguments.length - 1];
    import('/chart.js').then(({ chart }) => {
      const bands = [{ points: [[0, -50, 50], [1, 0.5, 0.6]], color: 0 }];
      const figure = chart('x', [{ name: 'x', points: [[0, 0], [1, 1]], color: 0 }], { bands, unit: 'tokens' });
      document.body.replaceChildren(figure);
      const unit = figure.querySelector('.unit'), box = unit.getBoundingClientRect();
      const heights = [...figure.querySelectorAll('.tick.end')].map((tick) => tick.textContent).slice(0, 5);
      done([heights, unit.textContent, document.elementFromPoint(box.x + 9, box.y + 9).getAttribute('class')]);
    })"""
    heights, unit, element = browser.execute_async_script(script)
    assert heights == ["-0.5", "0", "0.5", "1", "1.5"]  # the range of the line and half of it on either side
    assert (unit, element) == ("tokens", "unit middle"), "the band ends at the axis"


def test_updates_of_one_iteration_are_one_point_of_a_curve(browser: Any, demo: str) -> None:
    show(browser, demo)
    columns = {"progress/iteration": [1, 1, 2, 2], "step": [0, 1, 2, 3], "train/loss": [0.5, 1.5, None, 3]}
    script = """const [columns, axis, done] = arguments;
    import('/curves.js').then((module) => done(module.points(columns, axis, 'train/loss')))"""
    assert browser.execute_async_script(script, columns, "progress/iteration") == [[1, 1], [2, 3]]
    assert browser.execute_async_script(script, columns, "step") == [[0, 0.5], [1, 1.5], [3, 3]]


@pytest.mark.parametrize(
    ("mean", "bounds", "text"),
    [
        (0.035057, [0.007488, 0.062626], "0.035 [0.007, 0.063]"),
        (1, [0.6752, 1.3248], "1.00 [0.68, 1.32]"),
        (1234.5, [1000, 1469], "1235 [1000, 1469]"),
        (0.95, [0.95, 0.95], "0.95 [0.95, 0.95]"),
        (0.56254, [None, 2.9], "0.5625 [−∞, 2.9]"),
        (0.7, [0.7 - 2e-16, 0.7 + 1e-16], "0.7 [0.7, 0.7]"),
        (None, [0, 1.5], " [0, 1.5]"),
        (0.56254, [None, None], "0.5625"),
        (0.56254, None, "0.5625"),
        (None, None, ""),
    ],
)
def test_a_mean_has_the_digits_of_its_interval(
    mean: float | None, bounds: list[float | None] | None, text: str, browser: Any, demo: str
) -> None:
    show(browser, demo)
    script = """const [mean, bounds, done] = arguments;
    import('/dom.js').then((module) => done(module.estimate(mean, bounds)))"""
    assert browser.execute_async_script(script, mean, bounds) == text


def test_tasks_of_two_runs_are_ordered_by_their_difference(browser: Any, served: Any, tmp_path: Path) -> None:
    for name, rewards in (("one", [0.5, 0.0, 1.0]), ("two", [0.5, 0.25, 0.0])):
        played = [episode(f"{task}-0", task=task, rewards=(reward, reward)) for task, reward in enumerate(rewards)]
        write_run(tmp_path / name, [played])
    runs = find_runs([str(tmp_path)])
    one, two = runs
    show(browser, f"{served(runs)}#compare?run={one}&other={two}")
    cells = "return [...document.querySelector('tbody').rows].map((row) => row.cells[3].textContent)"
    assert browser.execute_script(cells) == ["1", "-0.25", "0"]


def test_filters_filter_and_the_address_keeps_them(browser: Any, demo: str) -> None:
    show(browser, f"{demo}#episodes?run={A}")
    assert rows(browser) == 32
    show(browser, f"{demo}#episodes?run={A}&from=1&to=2&group=1-0")
    assert rows(browser) == 4
    browser.execute_script(
        "const field = document.querySelector('input[name=group]'); field.value = '2-1';"
        "field.dispatchEvent(new Event('input'));"
    )
    assert rows(browser) == 4
    assert "group=2-1" in browser.current_url
    browser.execute_script("document.querySelector('input[name=error]').click()")
    assert rows(browser) == 0


def test_sorting_by_a_column(browser: Any, demo: str) -> None:
    show(browser, f"{demo}#episodes?run={A}&sort=reward")
    script = "return [...document.querySelectorAll('tbody tr')].map((row) => Number(row.children[4].textContent))"
    found = browser.execute_script(script)
    assert found == sorted(found)
    assert len(set(found)) > 3


@pytest.mark.parametrize("view", ["episode", "tokens", "group", "credit", "episodes", "health"])
def test_hostile_transcripts_stay_text(view: str, browser: Any, served: Any, tmp_path: Path) -> None:
    texts = [text.replace("\ud800", "") for text in HOSTILE]
    episodes = [
        episode(f"0-{n}", text, stop_reason=text[:200], metrics={text[:100]: 1.0}) for n, text in enumerate(texts)
    ]
    configuration = {"seed_everything": HOSTILE[0], "model": {"class_path": HOSTILE[1]}}
    address = served(find_runs([str(write_run(tmp_path / "run", [episodes], configuration))]))
    for number, text in enumerate(texts):
        query = f"run={tmp_path / 'run'}&id=0-{number}&group=0&iteration=0"
        shown = show(browser, f"{address}#{view}?{query}")
        assert "pwned" not in browser.title
        assert browser.execute_script("return document.title.endsWith('mrlm view')")
        foreign = (
            "img, iframe, form[action], base, object, a:not([href^='#']), main script, main style, main link, main meta"
        )
        assert browser.execute_script(f'return document.querySelectorAll("{foreign}").length') == 0
        assert not {"\x1b", "\u202e", "\u2066"} & set(shown)
        if view == "episode" and text.isprintable():
            assert text[:3000] in shown
        if view in ("episodes", "health"):
            break
    show(browser, f"{address}#run?run={tmp_path / 'run'}")
    assert HOSTILE[1] in show(browser, f"{address}#run?run={tmp_path / 'run'}")


def test_ten_thousand_episodes_and_thousand_iterations(browser: Any, served: Any, tmp_path: Path, capsys: Any) -> None:
    iterations = [[episode(f"{n}-{m}", iteration=n, task=m) for m in range(10)] for n in range(1000)]
    folder = write_run(tmp_path / "run", iterations, rewards=[n / 1000 for n in range(1000)])
    address = served(find_runs([str(folder)]))
    seconds = {}
    for view in ("runs", "curves", "episodes"):
        show(browser, f"{address}#{view}?run={folder}")
        show(browser, f"{address}#{view}?run={folder}")
        seconds[view] = browser.execute_script("return performance.now()") / 1000
    with capsys.disabled():
        print(f"\nseconds until a view of 10,000 episodes and 1,000 iterations is complete: {seconds}")
    assert rows(browser) == 100
    assert count(browser) == "10000 episodes, 1 to 100 shown"
    weight = "return performance.getEntriesByType('resource').filter((item) => !item.name.includes('/api/'))"
    assert browser.execute_script(f"{weight}.reduce((sum, item) => sum + item.decodedBodySize, 0)") < 250_000


def test_the_count_names_the_episodes_that_the_table_lacks(
    browser: Any, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 4)
    iterations = [[episode(f"{n}-{m}", iteration=n, task=m) for m in range(3)] for n in range(5)]
    folder = write_run(tmp_path / "run", iterations)
    (folder / "metrics.csv").write_text("step,progress/episodes\n0,15\n")
    address = served(find_runs([str(folder)]))
    for filters, shown in (
        ("", "4 of the run's 15 episodes"),
        ("&task=/0", "1 found among 4 of the run's 15 episodes"),
    ):
        show(browser, f"{address}#episodes?run={folder}{filters}")
        assert count(browser) == shown


def test_commands_that_play_again_are_of_runs_alone(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0")]])
    file = folder / "episodes" / "iteration-000000.jsonl.zst"
    for place, played in ((folder, True), (file, False)):
        text = show(browser, f"{served(find_runs([str(place)]))}#episode?run={place}&id=0-0")
        assert f"mrlm view {place} --text --episode 0-0" in text
        assert (f"mrlm replay {place}" in text, f"mrlm whatif {place}" in text) == (played, played)


def test_an_episode_of_thirty_thousand_tokens_scrolls(browser: Any, served: Any, tmp_path: Path) -> None:
    whole = episode("0-0")
    (row,) = whole.trajectories["first"]
    count = 30_000
    sampled = replace(
        row,
        token_ids=(4, *[40] * (count - 1)),
        action_mask=(False, *[True] * (count - 1)),
        logprobs=(0.0, *[-0.001 * (n % 100) for n in range(count - 1)]),
        turns=(replace(row.turns[0], start=1, stop=count),),
    )
    folder = write_run(tmp_path / "run", [[replace(whole, trajectories={"first": (sampled,)})]])
    show(browser, f"{served(find_runs([str(folder)]))}#tokens?run={folder}&id=0-0")
    wait(browser, "return document.querySelectorAll('.tokens span').length > 0")
    assert browser.execute_script("return document.querySelectorAll('.tokens span').length") < 15_000
    for step in range(1, 6):
        scroll = "const box = document.querySelector('.tokens'); box.scrollTop = box.scrollHeight * arguments[0] / 5"
        browser.execute_script(scroll, step)
        first = f"return Number(document.querySelector('.tokens span').dataset.index) > {count} * {step - 1} / 8"
        wait(browser, first)
        assert browser.execute_script("return document.querySelectorAll('.tokens span').length") < 15_000
    wait(browser, f"return [...document.querySelectorAll('.tokens span')].at(-1).dataset.index === '{count - 1}'")


def test_health_shows_the_state_and_the_mismatch_of_each_policy(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0")]])
    measures = {"k1": (0.5, 0.125), "k3": (0.5, 0.25), "effective_share": (1, 0.75), "max_ratio": (1, 1.5)}
    columns = {f"train/{name}/mismatch_{key}": values for name in ("pro", "con") for key, values in measures.items()}
    table = [columns.keys(), *zip(*columns.values(), strict=True), ["" for _ in columns]]
    (folder / "metrics.csv").write_text("".join(f"{','.join(map(str, row))}\n" for row in table))
    write_state(folder, {"state": "failed", "reason": "NonFiniteError: the loss is nan"})
    text = show(browser, f"{served(find_runs([str(folder)]))}#health?run={folder}")
    assert "failed: NonFiniteError: the loss is nan" in text
    cells = "return document.querySelector('table').innerText.split(/\\s+/).slice(-10)"
    assert browser.execute_script(cells) == [
        "pro",
        "0.125",
        "0.25",
        "0.75",
        "1.5",
        "con",
        "0.125",
        "0.25",
        "0.75",
        "1.5",
    ]


def test_the_start_of_health_has_the_state_and_the_failures_of_each_run(
    browser: Any, served: Any, tmp_path: Path
) -> None:
    for name, failed in (("a", 1), ("b", 0)):
        folder = write_run(tmp_path / name, [[episode("0-0")]])
        (folder / "metrics.csv").write_text(f"progress/failed_episodes,train/mismatch_k3\n{failed},0.25\n")
        write_state(folder, {"state": "interrupted"})
    address = served(find_runs([str(tmp_path)]))
    show(browser, f"{address}#health")
    lines = browser.execute_script("return [...document.querySelectorAll('li')].map((line) => line.textContent)")
    assert lines == [f"{tmp_path}/a: interrupted, 1 failed episode", f"{tmp_path}/b: interrupted"]
    text = show(browser, f"{address}#health?run={folder}")
    assert "The newest 1 episode: 0 failed, 0 retries, 0 truncated by a limit," in text
    assert browser.execute_script("return document.querySelector('td').textContent") == "main", "the run's only policy"


def test_equal_runs_have_no_interval(browser: Any, served: Any, tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, [[episode("0-0"), episode("1-0", task=1)]], rewards=[0.5])
    address = served(find_runs([str(tmp_path)]))
    text = show(browser, f"{address}#compare?run={tmp_path}/a&other={tmp_path}/b")
    assert "2 common tasks, paired by task: difference 0, no 95 % interval (equal values or one task)." in text
    assert "∞" not in text
    assert "∞" not in show(browser, f"{address}#runs")


def test_one_turn_with_an_advantage_does_not_tell_the_factor_of_the_others(
    browser: Any, served: Any, tmp_path: Path
) -> None:
    both = episode("0-0")
    alone = replace(both, trajectories={"first": both.trajectories["first"]})
    for name, record, end in (("a", alone, ""), ("b", both, ", the same factor for all turns with an advantage")):
        folder = write_run(tmp_path / name, [[record]])
        with_credit(folder / "episodes/iteration-000000.jsonl.zst", return_=1.5, baseline=2.0, advantage=-0.25)
        text = show(browser, f"{served(find_runs([str(folder)]))}#credit?run={folder}&id=0-0")
        assert f"advantage = (return − baseline) × 0.5{end}agent" in text


def test_stored_credit_is_shown_with_its_formula(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0")]])
    with_credit(folder / "episodes/iteration-000000.jsonl.zst", return_=1.5, baseline=2.0, advantage=-0.5)
    side = {"mean": 0.5, "ci95": [0.25, 0.75]}
    given = {"episode": "0-0", "agent": "first", "turn": 0, "recorded": side, "other": side}
    write_json(folder / "whatif" / "a.json", {**given, "advantage": 0.375, "ci95": [None, 1.0]})
    address = served(find_runs([str(folder)]))
    text = show(browser, f"{address}#credit?run={folder}&id=0-0")
    assert "advantage = return − baseline" in text
    assert "0.375 [−∞, 1]" in text
    assert (
        f"mrlm whatif {folder} --episode 0-0 --agent first --turn 0 --output {folder}/whatif/0-0-first-0.json" in text
    )
    assert "color by" in show(browser, f"{address}#tokens?run={folder}&id=0-0")
    assert browser.execute_script("return document.querySelector('option[value=advantage]').selected")


def test_episodes_that_the_credit_compares_are_listed_with_it(browser: Any, served: Any, tmp_path: Path) -> None:
    other = [
        episode(f"0-0/first/0/{number}", rewards=(number, 1.0), origin=Origin("0-0", ("first",), 0))
        for number in (2, 3)
    ]
    folder = write_run(tmp_path / "run", [[episode("0-0"), episode("0-00"), *other]])
    address = served(find_runs([str(folder)]))
    assert "Other continuations" in show(browser, f"{address}#credit?run={folder}&id=0-0")
    script = "return [...document.querySelectorAll('table:last-of-type tbody td')].map((cell) => cell.textContent)"
    assert browser.execute_script(script)[-4:] == ["0-0/first/0/2", "1.5", "0-0/first/0/3", "2"]
    assert "Other continuations" not in show(browser, f"{address}#credit?run={folder}&id=0-00")


def test_measures_of_tokens_are_offered_where_the_run_kept_them(browser: Any, served: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    folder = write_run(tmp_path / "run", [[episode("0-0"), episode("0-1")]])
    found = {"/first/0": {"ratio": [1.25, 0.5], "kl": [0.125, -0.375]}}
    write_lines(
        iteration_file(folder, 0, kind="tokens"), [json.dumps({"of": "0-0", "turns": found}, separators=(",", ":"))]
    )
    address = served(find_runs([str(folder)]))
    options = "return [...document.querySelectorAll('option')].map((item) => item.value)"
    show(browser, f"{address}#tokens?run={folder}&id=0-1")
    assert not {"ratio", "kl", "entropy"} & set(browser.execute_script(options))
    text = show(browser, f"{address}#tokens?run={folder}&id=0-0&agent=first&by=kl")
    assert {"ratio", "kl"} <= set(browser.execute_script(options))
    assert "entropy" not in browser.execute_script(options)
    assert "kl from -0.375 to 0.125" in text
    box = browser.find_element("css selector", ".tokens")
    box.send_keys(*[Keys.ARROW_RIGHT] * 5)
    readout = wait(browser, "return document.querySelector('.readout').textContent.match(/token 4.*/)?.[0]")
    assert "ratio 0.5" in readout
    assert "kl -0.375" in readout


@pytest.mark.parametrize(
    ("advantages", "shades"),
    [([2.0, 2.0], ["215 0.68", "215 0.68"]), ([2.0, -0.5], ["215 0.68", "5 0.23"]), ([0.0, 0.0], ["215 0.08"] * 2)],
)
def test_the_shade_of_an_advantage_tells_its_sign_and_size(
    advantages: list[float], shades: list[str], browser: Any, demo: str
) -> None:
    show(browser, demo)
    script = """const [values, done] = arguments;
    const bounds = [Math.min(...values), Math.max(...values)];
    import('/tokens.js').then(({ scale }) => done(values.map(scale('advantage', ...bounds))))"""
    found = [shade.replace("%", "").rstrip(")").split() for shade in browser.execute_async_script(script, advantages)]
    # 0.08 + 0.6 times the value over the largest in magnitude
    assert [f"{hue.removeprefix('hsl(')} {float(alpha):.2f}" for hue, _, _, _, alpha in found] == shades


def test_an_episode_opens_short_observations_and_shows_its_commands(browser: Any, served: Any, tmp_path: Path) -> None:
    whole = episode("0-0")
    (row,), (other,) = whole.trajectories.values()
    long = replace(other, messages=(replace(other.messages[0], content="x" * 300), *other.messages[1:]))
    one = replace(row, turns=(replace(row.turns[0], start=4),))
    folder = write_run(tmp_path / "run", [[replace(whole, trajectories={"first": (one,), "second": (long,)})]])
    text = show(browser, f"{served(find_runs([str(folder)]))}#episode?run={folder}&id=0-0")
    assert browser.execute_script("return [...document.querySelectorAll('.card details')].map((one) => one.open)") == [
        True,
        False,
    ]
    assert "1 tokenversion" in text
    assert "reward 0.5, ended: answered" in text
    assert f"mrlm replay {folder} --episode 0-0" in text
    assert f"mrlm whatif {folder} --episode 0-0 --agent second --turn 1" in text


def test_numbers_have_four_digits_and_counts_all(browser: Any, demo: str) -> None:
    show(browser, demo)
    script = "const [values, done] = arguments; import('/dom.js').then(({ number }) => done(values.map(number)))"
    values = [160123, 12345, 1234.6, 0.123456, 1.67e-17, -2.6e-18, -0.5, None]
    shown = ["160123", "12345", "1235", "0.1235", "0", "0", "-0.5", ""]
    assert browser.execute_async_script(script, values) == shown


def test_an_episode_that_is_not_among_the_newest_has_its_group_and_its_other_continuations(
    browser: Any, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = episode("0-0/first", origin=Origin("0-0", ("first",), 0))
    folder = write_run(tmp_path / "run", [[episode("0-0"), other], [episode("1-0", iteration=1)]])
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 2)
    url = served(find_runs([str(folder)]))
    assert "2 episodes, rewards 0.5 to 0.5" in show(browser, f"{url}#group?run={folder}&group=0&iteration=0")
    assert "Other continuationsEpisodes" in show(browser, f"{url}#credit?run={folder}&id=0-0")
    assert "Iteration 1 has no such group" in show(browser, f"{url}#group?run={folder}&group=0&iteration=1")


def test_a_failed_episode_has_no_reward(browser: Any, served: Any, tmp_path: Path) -> None:
    failed = episode("0-1", rewards=(0.5, 0.0), error="down", success=None)
    lone = episode("1-0", iteration=1, error="down")
    folder = write_run(tmp_path / "run", [[episode("0-0"), episode("0-2"), failed], [lone]])
    url = served(find_runs([str(folder)]))
    text = show(browser, f"{url}#episode?run={folder}&id=0-1")
    assert "ended: answered" in text
    assert "reward 0.25" not in text
    show(browser, f"{url}#episodes?run={folder}&id=0-&sort=id")
    cells = """return [...document.querySelectorAll('tbody tr')]
    .map((row) => [row.children[4], row.lastChild].map((cell) => cell.textContent))"""
    flat = ["0.5", "group without variance, solved"]
    assert browser.execute_script(cells) == [flat, ["", "group without variance, error: down"], flat]
    assert "1 episode, all failed" in show(browser, f"{url}#group?run={folder}&group=1&iteration=1")


def test_colors_are_those_of_success_and_of_advantages(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0", rewards=(0.05, 0.0), success=False)]])
    with_credit(folder / "episodes" / "iteration-000000.jsonl.zst", advantage=-0.5)
    show(browser, f"{served(find_runs([str(folder)]))}#episode?run={folder}&id=0-0")
    colored = "return [...document.querySelectorAll('.good, .bad')].map((one) => `${one.className} ${one.textContent}`)"
    assert browser.execute_script(colored) == ["bad not solved", *["bad advantage -0.5"] * 2]


def test_the_steps_of_one_agent_are_read_from_top_to_bottom_and_long_results_are_folded(
    browser: Any, served: Any, tmp_path: Path
) -> None:
    whole = episode("0-0")
    (row,), _ = whole.trajectories.values()
    call = replace(row.messages[1], tool_calls=(ToolCall("a", "search", {}),))
    results = (Message("tool", "line\n" * 20, tool_call_id="a"), Message("assistant", "4"))
    turns = (row.turns[0], replace(row.turns[0], index=1))
    long = replace(row, turns=turns, messages=(row.messages[0], call, *results))
    folder = write_run(tmp_path / "run", [[replace(whole, trajectories={"first": (long,)})]])
    show(browser, f"{served(find_runs([str(folder)]))}#episode?run={folder}&id=0-0")
    places = """return [...document.querySelectorAll('.card')].map((one) => one.getBoundingClientRect())
    .map(({ x, y }) => [x, y])"""
    (x, y), (next_x, next_y) = browser.execute_script(places)
    assert x == next_x
    assert next_y > y
    assert browser.execute_script("return document.querySelector('.call details').open") is False


def test_letters_of_two_columns_do_not_widen_the_lines_of_tokens(browser: Any, demo: str) -> None:
    show(browser, demo)
    script = "const [row, done] = arguments; import('/tokens.js').then(({ layout }) => done(layout(row, 7)))"
    row = {"token_ids": [1, 2, 3], "tokens": ["\u4f60\u597d\u4f60", "ab", "\tcd"], "turns": []}
    assert browser.execute_async_script(script, row) == [[0, 1], [1, 3]]  # 6 columns, then 2 and 3


def test_the_advantages_of_the_table_have_signs_and_are_sorted_by_magnitude(
    browser: Any, served: Any, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", [[episode(f"{n}-0", iteration=n)] for n in range(3)])
    for number, advantage in enumerate((0.5, -2.0, 1.0)):
        with_credit(folder / "episodes" / f"iteration-{number:06d}.jsonl.zst", advantage=advantage)
    show(browser, f"{served(find_runs([str(folder)]))}#episodes?run={folder}")
    cells = "return [...document.querySelectorAll('tbody tr')].map((row) => row.children[5].textContent)"
    assert browser.execute_script(cells) == ["-2", "1", "0.5"]


def test_the_filter_of_the_curves_shows_its_whole_placeholder(browser: Any, demo: str) -> None:
    show(browser, demo + VIEWS["curves"])
    script = """const field = document.querySelector('input[type=search]'), style = getComputedStyle(field);
    const pen = document.createElement('canvas').getContext('2d');
    pen.font = style.font;
    return field.clientWidth - parseFloat(style.paddingLeft) * 2 - pen.measureText(field.placeholder).width"""
    assert browser.execute_script(script) > 10


def test_the_keyboard_alone_suffices(browser: Any, demo: str) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, demo)

    def press_until(text: str) -> Any:
        for _ in range(60):
            browser.switch_to.active_element.send_keys(Keys.TAB)
            if browser.switch_to.active_element.text == text:
                return browser.switch_to.active_element
        raise AssertionError(f"{text!r} cannot be reached by the tabulator")

    press_until(A).send_keys(Keys.ENTER)
    wait(browser, READY + " && location.hash.startsWith('#run?')")
    browser.execute_script("document.activeElement.blur()")
    press_until("episodes").send_keys(Keys.ENTER)
    wait(browser, READY + " && location.hash.startsWith('#episodes')")
    press_until("3-1-3").send_keys(Keys.ENTER)
    wait(browser, READY + " && location.hash.startsWith('#episode?')")
    press_until("Tokens").send_keys(Keys.ENTER)
    wait(browser, READY + " && location.hash.startsWith('#tokens')")
    box = browser.find_element("css selector", ".tokens")
    box.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert "token 1, id" in browser.find_element("css selector", ".readout").text


def test_light_and_dark(browser: Any, demo: str) -> None:
    colors = []
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        show(browser, demo)
        colors.append(
            browser.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert colors[0][0] == "rgb(255, 255, 255)"
    assert colors[0] != colors[1]


def test_a_running_run_is_followed(browser: Any, served: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[episode("0-0")]], rewards=[0.5])
    show(browser, f"{served(find_runs([str(folder)]))}#episodes?run={folder}")
    assert rows(browser) == 1
    browser.execute_script("window.dispatchEvent(new Event('focus'))")
    write_run(tmp_path / "other", [[], [episode("1-0", iteration=1)]])
    wait(
        browser,
        "return performance.getEntriesByType('resource').filter((item) => item.name.includes('api/runs')).length > 1",
    )
    name = "episodes/iteration-000001.jsonl.zst"
    (tmp_path / "other" / name).rename(folder / name)
    wait(browser, "return document.querySelectorAll('tbody tr').length === 2")


@pytest.mark.parametrize("view", VIEWS)
def test_an_exported_page_opens_without_a_server(view: str, browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(export_page(demonstration()))
    text = show(browser, page.as_uri() + VIEWS[view])
    assert browser.execute_script("return document.querySelector('[role=alert]')") is None, text


def test_an_exported_page_keeps_hostile_text(browser: Any, tmp_path: Path) -> None:
    texts = [text.replace("\ud800", "") for text in HOSTILE]
    folder = write_run(tmp_path / "run", [[episode(f"0-{n}", text) for n, text in enumerate(texts)]])
    page = tmp_path / "page.html"
    page.write_text(export_page(find_runs([str(folder)])))
    for number, text in enumerate(texts):
        shown = show(browser, f"{page.as_uri()}#episode?run={folder}&id=0-{number}")
        assert "pwned" not in browser.title
        if text.isprintable():
            assert text[:3000] in shown
