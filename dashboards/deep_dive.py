"""The second dashboard: what is behind the first one."""

from dashboards.panels import Board, Panel, Query, Row, lines, metric, quantiles, top, total

GOOD, WARN, BAD = "green", "orange", "red"
_RATE = "$__rate_interval"
_MEAN = 'estimate="mean"'


def _a_minute(name: str, legend: str) -> Query:
    return Query(expr=f"60 * sum(rate({metric(f'{name}_total')}[{_RATE}]))", legend=legend)


DEEP_DIVE = Board(
    uid="lastgood-deep-dive",
    title="lastgood: deep dive",
    description="Saves, recovery, cadence and ranks.",
    rows=(
        Row(
            title="Saves",
            panels=(
                lines(
                    "Saves",
                    "How many a minute, by what became of them.",
                    _a_minute("saves_committed", "committed"),
                    _a_minute("saves_skipped", "skipped"),
                    Query(
                        expr=f"60 * sum(rate({metric('save_attempts_failed_total')}[{_RATE}]))",
                        legend="failed attempts",
                    ),
                    _a_minute("saves_failed", "given up"),
                    _a_minute("saves_stalled", "stalled"),
                    minimum=0,
                ),
                lines(
                    "A save's phases",
                    "Average of those in the window: standing still, copying, durable, read back, committed.",
                    *(
                        Query(
                            expr=f"sum(rate({metric(f'save_{part}_seconds_sum')}[{_RATE}])) / "
                            f"sum(rate({metric(f'save_{part}_seconds_count')}[{_RATE}]))",
                            legend=part,
                        )
                        for part in ("stall", "copy", "durable", "verify", "commit")
                    ),
                    unit="s",
                    minimum=0,
                ),
                lines(
                    "Stall",
                    "How long the loop stood still for a save; over the range that is shown.",
                    *quantiles("save_stall_seconds", legend="{{run}} "),
                    unit="s",
                    minimum=0,
                ),
                lines(
                    "Bytes saved",
                    "Per second.",
                    Query(expr=f"sum by (run) (rate({metric('saved_bytes_total')}[{_RATE}]))"),
                    unit="Bps",
                    minimum=0,
                ),
                lines(
                    "Overhead of saving",
                    "Part of the training time that stall and interference took, since the run began.",
                    Query(expr=top("save_overhead_ratio")),
                    unit="percentunit",
                    minimum=0,
                ),
                lines(
                    "Room on the storage",
                    "What can still be written, and the size of the newest checkpoint.",
                    Query(expr=f"min by (run) ({metric('storage_free_bytes')})", legend="{{run}} free"),
                    Query(expr=top("checkpoint_bytes"), legend="{{run}} checkpoint"),
                    unit="bytes",
                    minimum=0,
                ),
            ),
        ),
        Row(
            title="Recovery",
            panels=(
                lines(
                    "Generations",
                    "Each rise is a restart.",
                    Query(expr=top("generation")),
                ),
                Panel(
                    title="Where states came from",
                    description="Generations by rung of the restore ladder; copies are another node's.",
                    kind="bars",
                    queries=(Query(expr=total("restores_total", "rung"), legend="{{rung}}"),),
                ),
                lines(
                    "Time to notice",
                    "From when a failure struck until the coordinator knew; over the range that is shown.",
                    *quantiles("detection_seconds", legend="{{run}} "),
                    unit="s",
                    may_be_empty="without failures in the range",
                ),
                lines(
                    "Time to recover",
                    "Until all ranks had done a step, and until the lost step was done again.",
                    *quantiles("recovery_seconds", by="until", legend="{{until}} "),
                    unit="s",
                    may_be_empty="without failures in the range",
                ),
                lines(
                    "Samples lost",
                    "By cause, where the loader is lastgood's.",
                    Query(
                        expr=total("lost_samples_total", "cause"),
                        legend="{{cause}}",
                    ),
                ),
                lines(
                    "Signs of trouble",
                    "Totals: suspected hangs, checkpoints set aside, saves that ranks did not hold alike, nodes that "
                    "went, batches that are skipped.",
                    *(
                        Query(expr=f"sum(max by (run) ({metric(f'{name}_total')}))", legend=name.replace("_", " "))
                        for name in ("suspicions", "quarantined", "corruptions", "nodes_lost", "batches_skipped")
                    ),
                ),
                lines(
                    "Drivers, coordinators, notices",
                    "How often fit() was called, how often the coordinator was restarted, what was announced to go.",
                    Query(expr=top("drivers_total"), legend="{{run}} drivers"),
                    Query(
                        expr=top("coordinator_restarts_total"),
                        legend="{{run}} coordinator restarts",
                    ),
                    Query(expr=total("notices_total", "reason"), legend="{{reason}}"),
                ),
            ),
        ),
        Row(
            title="Cadence",
            panels=(
                lines(
                    "Intervals",
                    "Chosen, and what would pay best without bounds.",
                    Query(expr=top("interval_seconds", by="run, tier"), legend="{{run}} {{tier}} chosen"),
                    Query(expr=top("interval_best_seconds", by="run, tier"), legend="{{run}} {{tier}} best"),
                    unit="s",
                ),
                lines(
                    "Intervals in steps",
                    "The same as ranks are told.",
                    Query(expr=top("interval_steps", by="run, tier"), legend="{{run}} {{tier}}"),
                ),
                lines(
                    "Bounds that bit",
                    "1 while a bound makes the interval another one than the best.",
                    Query(
                        expr=top("interval_bound", by="run, tier, bound"),
                        legend="{{run}} {{tier}}: {{bound}}",
                    ),
                    maximum=1,
                ),
                lines(
                    "Expected goodput",
                    "With the chosen interval, of each tier alone.",
                    Query(expr=top("interval_goodput_ratio", by="run, tier"), legend="{{run}} {{tier}}"),
                    unit="percentunit",
                    maximum=1,
                ),
                lines(
                    "Believed time between failures",
                    "With the bounds of 90 % probability.",
                    Query(expr=top("mtbf_seconds", by="run, estimate"), legend="{{run}} {{estimate}}"),
                    unit="s",
                ),
            ),
        ),
        Row(
            title="Ranks",
            panels=(
                lines(
                    "Step time",
                    "Of the fastest, median and slowest rank. They keep step: a slow one shows in the next panel.",
                    Query(expr=top("step_seconds", by="run, ranks"), legend="{{run}} {{ranks}}"),
                    unit="s",
                    minimum=0,
                ),
                lines(
                    "Waited for",
                    "Part of the last two minutes in which all others waited for one rank alone; the worst ranks.",
                    Query(expr=top("rank_waited_for_ratio", by="run, rank"), legend="{{run}} rank {{rank}}"),
                    unit="percentunit",
                    minimum=0,
                    maximum=1,
                    may_be_empty="while no rank was ever behind alone",
                ),
                lines(
                    "Stragglers",
                    "Ranks that were found to hold up all others, and what part of the time that costs.",
                    Query(expr=top("stragglers"), legend="{{run}} stragglers"),
                    Query(
                        expr=f"max by (run, rank) ({metric('straggler_cost_ratio')}) or "
                        f"max by (run) (0 * {metric('stragglers')})",
                        legend="{{run}} cost of rank {{rank}}",
                    ),
                ),
                lines(
                    "Memory of ranks",
                    "With their loader workers; the largest ranks.",
                    Query(expr=top("rank_memory_bytes", by="run, rank"), legend="{{run}} rank {{rank}}"),
                    unit="bytes",
                    minimum=0,
                ),
                lines(
                    "Ranks",
                    "How many there are, and how many were heard of in the last ten seconds.",
                    Query(expr=top("world_size"), legend="{{run}} ranks"),
                    Query(expr=top("ranks_heard"), legend="{{run}} heard"),
                    minimum=0,
                ),
                lines(
                    "Loss",
                    "What the loop gave to end_step.",
                    Query(expr=top("loss")),
                    may_be_empty="if the loop gives none",
                ),
            ),
        ),
        Row(
            title="The exporter",
            panels=(
                lines(
                    "Scrapes",
                    "How long gathering the metrics took.",
                    Query(expr=top("exporter_scrape_seconds")),
                    unit="s",
                    minimum=0,
                ),
                lines(
                    "Errors",
                    "Requests that failed, connections that were too many, lines that the ledger could not write.",
                    *(
                        Query(expr=f"sum(increase({metric(f'{name}_total')}[{_RATE}]))", legend=name.replace("_", " "))
                        for name in ("exporter_errors", "exporter_connections_refused", "ledger_lines_lost")
                    ),
                    minimum=0,
                ),
                lines(
                    "Runs",
                    "What the label run stands for.",
                    Query(
                        expr=metric("run_info"),
                        legend="{{run}}: {{run_dir}}, driver {{driver}}, {{version}}",
                    ),
                ),
            ),
        ),
    ),
)
