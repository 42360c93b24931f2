"""The alerts, the dashboard and their page use metrics that the daemons export, and use them
right."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from nsparq.pipeline.execute.progress import Figures, State
from nsparq.pipeline.execute.status import Status, serve
from tests.admin.support import AdminThread, join
from tests.replication.cluster import run_cluster
from tests.replication.coordinators import run_etcd
from tests.support import BrokerThread
from tests.support.lookupd import start_lookupd
from tests.support.polling import DEADLINE

from .promql import OF_COUNTERS, OF_GAUGES, Expression, parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/monitoring.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy/grafana/nsparq.json").read_text(encoding="utf-8"))
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel, target) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for _, target in QUERIES),
    *(note["expr"] for note in DASHBOARD["annotations"]["list"]),
]
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to everything."""


class Metric(NamedTuple):
    kind: str
    labels: frozenset[str]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """By sample name: from an nsqd with a topic, a channel, a consumer and an archive, from a
    replicated one, from a runner with a pipeline that has run, and Prometheus' own `up`."""
    found = {"up": Metric("gauge", frozenset())}
    replicated = cluster_metrics(tmp_path_factory.mktemp("cluster"))
    for text in (replicated, *daemon_metrics(tmp_path_factory.mktemp("archive")), pipeline_metrics()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = Metric(family.type, frozenset(sample.labels))
    return found


def daemon_metrics(store: Path) -> Iterator[str]:
    """Of nsqlookupd, nsqadmin and nsqd; the last counts where they have the same metrics."""
    flags = {"e2e_processing_latency_percentile": (0.5, 0.99), "archive": store.as_uri()}
    with BrokerThread(**flags) as broker, start_lookupd() as lookupd:
        yield lookupd.request("GET", "/metrics").body.decode()
        history = str(Path(broker.data_path) / "history")
        with AdminThread(nsqd_http_address=(join(broker.http_address),), history_path=history) as admin:
            yield admin.call("GET", "/metrics").body.decode()
        broker.control("create", "orders", "billing")
        with broker.connect() as consumer:
            consumer.identify()
            consumer.sub("orders", "billing", rdy=1)
            broker.publish("orders", b"one")
            consumer.fin(consumer.read_message().id)
            consumer.barrier()
            yield broker.http("GET", "/metrics").decode()


def cluster_metrics(directory: Path) -> str:
    """Of the primary of a pair."""
    with run_etcd(directory / "etcd") as url:
        with run_cluster(directory, url.replace("http://", "etcd://")) as cluster:
            return cluster.primary("ab").http("GET", "/metrics").decode()


def pipeline_metrics() -> str:
    figures = Figures("shop", state=State.RUNNING, lag=5, catch_up_seconds=0.0, last_batch=time.time())
    endpoint = serve("127.0.0.1:0", Status("shop.toml", [figures], time.time()))
    try:
        with urlopen(f"http://{endpoint.address}/metrics", timeout=DEADLINE) as answer:
            return str(answer.read().decode())
    finally:
        endpoint.close()


def read(expression: str) -> Expression:
    return parse(expression.replace("$__rate_interval", "5m"))


def result_labels(expression: Expression, exported: dict[str, Metric]) -> set[str]:
    """Labels of what comes out, so far as they can be counted on."""
    if expression.grouped_by:
        return set.intersection(*expression.grouped_by) - {"le"}
    return set.intersection(*({*exported[one.metric].labels} | SCRAPED for one in expression.selectors))


# expressions


def test_every_metric_and_label_of_an_expression_is_exported(exported: dict[str, Metric]) -> None:
    for text in EXPRESSIONS:
        expression = read(text)
        assert expression.selectors, text
        for one in expression.selectors:
            assert one.metric in exported, text
            assert one.labels <= exported[one.metric].labels | SCRAPED, text
        together = set.union(*({*exported[one.metric].labels} for one in expression.selectors)) | SCRAPED
        for labels in expression.grouped_by:
            assert labels <= together, text


def test_counters_are_looked_at_by_rate_and_gauges_as_they_are(exported: dict[str, Metric]) -> None:
    for text in EXPRESSIONS:
        for one in read(text).selectors:
            kind = exported[one.metric].kind
            assert one.has_range == (one.function in OF_COUNTERS | OF_GAUGES | {"changes"}), text
            assert (one.function in OF_COUNTERS) == (kind in ("counter", "histogram")), text


@pytest.mark.parametrize(
    "text", ["sum(", "sum(a))", "sum by topic (a)", "summ(a)", 'a{b="c"', "a ? b", "sum by (x)", "[5m]"]
)
def test_invalid_promql_is_noticed(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        parse(text)


# alerts


def test_alerts_are_loaded_and_their_jobs_are_scraped() -> None:
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    jobs = {job["job_name"] for job in PROMETHEUS["scrape_configs"]}
    assert jobs == {"nsqd", "nsqlookupd", "nsqadmin", "nsparq-pipelines"}
    used = {job for text in EXPRESSIONS for job in re.findall(r'job="([^"]*)"', text)}
    assert used <= jobs


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_says_how_urgent_it_is_and_what_is_wrong(
    rule: dict[str, Any], exported: dict[str, Metric]
) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
    assert set(rule["annotations"]) in ({"summary"}, {"summary", "description"})
    named = {name for text in rule["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)}
    assert named <= result_labels(read(rule["expr"]), exported)


def test_the_page_lists_every_alert_with_its_severity() -> None:
    section = PAGE.partition("## Alerts")[2].partition("\n## ")[0]
    listed = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, _, severity = (cell.strip() for cell in line.strip("|").split("|"))
            listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), severity)
    assert listed == {rule["alert"]: rule["labels"]["severity"] for rule in RULES}


def test_the_page_lists_every_metric_and_no_other(exported: dict[str, Metric]) -> None:
    section = PAGE.partition("## The metrics")[2]
    names = r"`((?:nsqd|nsqlookupd|nsqadmin|nsparq_pipeline|process)_\w+[a-z])(?:\{[^`]*\})?`"
    listed = set(re.findall(names, section))
    histograms = {name.removesuffix("_count") for name, one in exported.items() if one.kind == "histogram"}
    parts = {name for name in exported for one in histograms if name.startswith(f"{one}_")}
    assert listed == {*exported} - parts - {"up"} | (histograms & listed)
    assert "nsqd_loop_lag_seconds" in listed


# dashboard


def test_the_dashboard_shows_all_that_is_worth_a_look(exported: dict[str, Metric]) -> None:
    """Each of them is either on it or has a reason not to be."""
    shown = {one.metric for text in EXPRESSIONS for one in read(text).selectors}
    shown |= {re.sub(r"\W.*", "", name) for name in re.findall(r"label_values\((\w+)", json.dumps(DASHBOARD))}
    left_out = {
        "nsqd_topics",  # the variable lists them
        "nsqd_replication_epoch",  # the log has it
        "nsqd_topic_archive_segments",  # the bytes say more
        "nsqd_topic_archive_waiting_segments",
        "nsqd_archive_sent_segments_total",
        "nsqd_archive_fetched_segments_total",
        "nsqd_archive_cache_bytes",  # has a limit
        "nsqd_disk_info",  # for nsqadmin, which lists each disk once
        "nsqd_topic_paused",
        "nsqd_topic_backend_depth",  # parts of others
        "nsqd_channel_backend_depth",
        "nsqd_channel_parked",
        "nsqd_topic_dropped_messages_total",
        "nsqd_topic_corrupt_batches_total",
        "nsqd_topic_corrupt_files_total",  # they cost no message, and the log names them
        "nsqd_corrupt_files_total",
        "nsqd_topic_repeated_messages_total",  # repeats are nothing to worry about
        "nsqd_topic_e2e_processing_latency_seconds",
        "nsqd_loop_lag_seconds_sum",
        "nsqd_loop_lag_seconds_count",
        "nsqd_transactions_staged_bytes",
        "nsqd_transactions_aborted_total",
        "nsqd_transactions_expired_total",
        "nsqd_transactions_lost_messages_total",  # the alert looks at those that are damaged
        "process_start_time_seconds",
        "nsparq_pipeline_catch_up_seconds",  # the lag shows how it falls
        "nsparq_pipeline_rows_written_total",
        "nsparq_pipeline_rows_per_second",
        "nsparq_pipeline_batches_total",
    }
    ours = {name for name in exported if not name.startswith(("nsqlookupd_", "nsqadmin_"))}
    assert ours - shown == left_out


def test_panels_have_their_own_place() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*ids}) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {*itertools.product(columns, range(place["y"], place["y"] + place["h"]))}
        assert columns.stop <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def variables() -> Iterator[dict[str, Any]]:
    yield from DASHBOARD["templating"]["list"]


def test_variables_are_defined_and_filled_from_metrics_that_exist(exported: dict[str, Metric]) -> None:
    names = {one["name"] for one in variables()}
    assert {*re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD["panels"]))} <= names
    queries = [one["query"]["query"] for one in variables() if one["type"] == "query"]
    assert len(queries) == 4
    for query in queries:
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        (one,) = parse(selector).selectors
        assert {label, *one.labels} <= exported[one.metric].labels | SCRAPED


@pytest.mark.parametrize(("panel", "target"), QUERIES, ids=[f"{p['title']} {t['refId']}" for p, t in QUERIES])
def test_a_panel_names_its_lines_by_labels_that_they_have(
    panel: dict[str, Any], target: dict[str, Any], exported: dict[str, Metric]
) -> None:
    assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    letters = [one["refId"] for one in panel["targets"]]
    assert len({*letters}) == len(letters)
    labels = result_labels(read(target["expr"]), exported)
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
