"""Writes headway.json, the Grafana dashboard: `make docs`. The builders are typed, so that misspelt fields
do not build."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import common, gauge, heatmap, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FILE = Path(__file__).with_name("headway.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
WHERE = 'job=~"$job", instance=~"$instance"'
HISTOGRAMS = {
    "Time to first token": "headway_time_to_first_token_seconds",
    "Time per output token": "headway_time_per_output_token_seconds",
    "Gap between pieces": "headway_chunk_gap_seconds",
    "End to end": "headway_request_duration_seconds",
    "Time in the queue": "headway_queue_time_seconds",
}
Queries = dict[str, str]  # {legend: expression}


def build() -> str:
    board = (
        dashboards.Dashboard("Headway")
        .uid("headway")
        .tags(["llm", "headway"])
        .description("Speculation, latency and capacity of Headway servers.")
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(dashboards.DatasourceVariable("source").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "Job", "label_values(headway_engine_state, job)"))
        .with_variable(
            _variable("instance", "Instance", 'label_values(headway_engine_state{job=~"$job"}, instance)')
        )
    )
    for row, panels in (
        ("Now", _now()),
        ("Speculation", _speculation()),
        ("Latency", _latency()),
        ("Capacity", _capacity()),
        ("Fleet", _fleet()),
    ):
        board = board.with_row(dashboards.Row(row))
        for panel in panels:
            board = board.with_panel(panel)
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _now() -> list[stat.Panel | gauge.Panel]:
    return [
        _stat("Estimated speed-up", f"avg({_speedup()})", "x", 2),
        _stat("Generated", f"sum(rate(headway_generation_tokens_total{{{WHERE}}}[1m]))", "tokens/s", 0),
        _stat("Streams", f"sum(headway_num_requests_running{{{WHERE}}})", "short", 0),
        _stat("Waiting", f"sum(headway_num_requests_waiting{{{WHERE}}})", "short", 0),
        _stat("Acceptance length", _mean("headway_tokens_per_round", by=""), "tokens", 2),
        _gauge(
            "Accepted drafts",
            f"{_sum('headway_spec_decode_num_accepted_tokens_total')} / {_sum('headway_spec_decode_num_draft_tokens_total')}",
        ),
        _gauge("KV cache in use", f"max(headway_kv_cache_usage_ratio{{{WHERE}}})"),
        _stat("Audits that differ", f'sum(headway_audits_total{{{WHERE}, outcome="different"}})', "short", 0)
        .thresholds(_red_from(1)),
    ]  # fmt: skip


def _speculation() -> list[timeseries.Panel | heatmap.Panel]:
    per_position = [f"headway_spec_decode_num_{kind}_tokens_per_pos_total" for kind in ("accepted", "draft")]
    accepted, drafted = (_sum(name, by="position") for name in per_position)
    return [
        _chart("Acceptance by position", {"draft {{position}}": f"{accepted} / {drafted}"}, "percentunit", top=1.0)
        .description("Of the drafts at each place of the window, the share that the model itself picks there."),
        _chart("Acceptance length", {"{{instance}}": _mean("headway_tokens_per_round")}, "tokens")
        .description("Tokens that a row gets in a round, the bonus token included; 1 without speculation."),
        _chart("Estimated speed-up", {"{{instance}}": _speedup()}, "x")
        .description("Tokens a second of the last minute over what rounds without drafts would have given."),
        _depths(),
        _chart("Depth", {"{{instance}}": _mean("headway_spec_decode_depth")}, "drafts")
        .description("Drafts a round, the mean over rounds."),
        _chart("Tokens generated", {"accepted drafts": _sum("headway_spec_decode_num_accepted_tokens_total"),
               "by the model": f"{_sum('headway_generation_tokens_total')} - {_sum('headway_spec_decode_num_accepted_tokens_total')}"},
               "tokens/s", is_stacked=True)
        .description("Where the tokens come from: free from the MTP head, or from the target model."),
        _chart("Audits", {"{{outcome}}": f"sum by (outcome) (increase(headway_audits_total{{{WHERE}}}[10m]))"}, "short", is_stacked=True)
        .description("Requests that were computed again without drafts, in ten minutes: each text must be the same."),
    ]  # fmt: skip


def _speedup() -> str:
    """Returns the gauge of each instance that has one. It is NaN, which is not above 0, if no round was
    timed."""
    return f"headway_spec_decode_estimated_speedup_ratio{{{WHERE}}} > 0"


def _depths() -> heatmap.Panel:
    query = Dataquery().expr(_sum("headway_spec_decode_depth_bucket", by="le"))
    query = query.format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    panel = heatmap.Panel().title("Depth chosen").datasource(SOURCE).span(12).height(8)
    panel = panel.calculate(False).color(colours).filter_values(heatmap.FilterValueRange().le(1e-9))
    panel = panel.show_tooltip().cell_values(heatmap.CellValues().unit("rounds/s"))
    panel = panel.description("Rounds a second with each number of drafts, of all instances.")
    return panel.with_target(query)


def _latency() -> list[timeseries.Panel]:
    return [
        _chart(title, {f"p{share}": _quantile(share, name) for share in (50, 95, 99)}, "s")
        for title, name in HISTOGRAMS.items()
    ]


def _capacity() -> list[timeseries.Panel]:
    return [
        _chart("Requests", {"running": f"sum(headway_num_requests_running{{{WHERE}}})",
               "waiting": f"sum(headway_num_requests_waiting{{{WHERE}}})"}, "short"),
        _chart("Tokens", {"prompt": _sum("headway_prompt_tokens_total"),
               "spared by the prefix cache": _sum("headway_prefix_cache_hit_tokens_total"),
               "generated": _sum("headway_generation_tokens_total")}, "tokens/s"),
        _chart("KV cache blocks", {"{{state}}": f"sum by (state) (headway_kv_cache_blocks{{{WHERE}}})"}, "short"),
        _chart("Requests that ended", {"{{reason}}": _sum("headway_requests_finished_total", by="reason")}, "reqps"),
        _chart("HTTP answers", {"{{status}}": _sum("headway_http_responses_total", by="status", where='endpoint!="other"') + " > 0"}, "reqps"),
        _chart("Preemptions and restarts", {"preemptions": _sum("headway_preemptions_total"),
               "restarts": _sum("headway_engine_restarts_total")}, "ops"),
        _chart("The device's time", {"{{stage}}": _sum("headway_stage_seconds_total", by="stage")}, "short", is_stacked=True)
        .description("Seconds a second, by its own clock: prefill, drafts, the target's forward pass, bookkeeping."),
        _chart("The API process", {"CPU seconds a second": _sum("process_cpu_seconds_total")}, "short"),
        _chart("Memory of the API process", {"{{instance}}": f"process_resident_memory_bytes{{{WHERE}}}"}, "bytes"),
    ]  # fmt: skip


def _fleet() -> list[timeseries.Panel]:
    """Returns panels that are empty for a single server, which has no label `replica`."""
    hits, prompts = (
        _sum(f"headway_{name}_tokens_total", by="replica", where='replica!=""')
        for name in ("prefix_cache_hit", "prompt")
    )
    return [
        _chart("Replicas", {"{{state}}": f"sum by (state) (headway_fleet_replicas{{{WHERE}}})"}, "short", is_stacked=True)
        .description("By their state, as Ray Serve has it."),
        _chart("Requests by the router's reason", {"{{reason}}": _sum("headway_fleet_requests_routed_total", by="reason")}, "reqps", is_stacked=True)
        .description("prefix: to the replica that owns the beginning; spilled: that one had too many requests."),
        _chart("Requests of each replica", {"{{replica}}": _of_replicas("headway_num_requests_running")}, "short", is_stacked=True),
        _chart("Requests that wait at each replica", {"{{replica}}": _of_replicas("headway_num_requests_waiting")}, "short", is_stacked=True),
        _chart("KV cache of each replica", {"{{replica}}": _of_replicas("headway_kv_cache_usage_ratio")}, "percentunit", top=1.0),
        _chart("Prompt tokens found in each replica's cache", {"{{replica}}": f"{hits} / {prompts}"}, "percentunit", top=1.0),
        _chart("Streams that went on in another replica", {"{{replica}}": _sum("headway_fleet_streams_continued_total", by="replica")}, "ops"),
    ]  # fmt: skip


def _of_replicas(gauge: str) -> str:
    return f'sum by (replica) ({gauge}{{{WHERE}, replica!=""}})'


def _sum(name: str, *, by: str = "", where: str = "") -> str:
    """Returns the rate of a counter over a minute, summed over instances."""
    labels = f"{WHERE}, {where}" if where else WHERE
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{labels}}}[1m]))"


def _mean(histogram: str, *, by: str = "instance") -> str:
    return f"{_sum(f'{histogram}_sum', by=by)} / {_sum(f'{histogram}_count', by=by)}"


def _quantile(share: int, histogram: str) -> str:
    return f"histogram_quantile({share / 100:g}, {_sum(f'{histogram}_bucket', by='le')})"


def _variable(name: str, label: str, query: str) -> dashboards.QueryVariable:
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".+")
        .multi(True)
    )


def _red_from(value: float) -> dashboards.ThresholdsConfig:
    steps = [Threshold(value=None, color="green"), Threshold(value=value, color="red")]
    return dashboards.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _stat(title: str, expression: str, unit: str, decimals: int) -> stat.Panel:
    panel = stat.Panel().title(title).datasource(SOURCE).unit(unit).decimals(decimals)
    return panel.with_target(Dataquery().expr(expression)).span(3).height(4)


def _gauge(title: str, expression: str) -> gauge.Panel:
    query = Dataquery().expr(expression)
    panel = gauge.Panel().title(title).datasource(SOURCE).unit("percentunit").min(0).max(1)
    return panel.with_target(query).span(3).height(4)


def _chart(
    title: str, queries: Queries, unit: str, *, top: float | None = None, is_stacked: bool = False
) -> timeseries.Panel:
    panel = timeseries.Panel().title(title).datasource(SOURCE).unit(unit).min(0).span(12).height(8)
    panel = panel.fill_opacity(30 if is_stacked else 8).line_width(2)
    panel = panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
    )
    panel = panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if top is not None:
        panel = panel.max(top)
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for i, (legend, expression) in enumerate(queries.items()):
        panel = panel.with_target(
            Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + i))
        )
    return panel


if __name__ == "__main__":
    FILE.write_text(build())
