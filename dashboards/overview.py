"""The first dashboard: is the run protected, what did failures cost, is it well?"""

from dashboards.panels import Board, Panel, Query, Row, lines, metric, quantiles, stat, top, total

GOOD, WARN, BAD = "green", "orange", "red"
_RATE = "$__rate_interval"
_MEAN = 'estimate="mean"'

OVERVIEW = Board(
    uid="lastgood-overview",
    title="lastgood: overview",
    description="Is the run protected, what did failures cost, and is it well?",
    rows=(
        Row(
            title="Is it well",
            panels=(
                stat(
                    "Health",
                    "What /healthz says: protected, and getting on.",
                    top("healthy"),
                    words=(("1", "well"), ("0", "not well")),
                    steps=((None, BAD), (1, GOOD)),
                ),
                stat(
                    "State",
                    "What the run is doing.",
                    top("state", by="run, state") + " == 1",
                    queries=(Query(expr=top("state", by="run, state") + " == 1", legend="{{state}}"),),
                    named=True,
                ),
                stat(
                    "Goodput",
                    "Part of all time since the run began that went into steps that were not done before.",
                    top("goodput_ratio"),
                    unit="percentunit",
                    steps=((None, BAD), (0.8, WARN), (0.95, GOOD)),
                ),
                stat(
                    "Newest verified checkpoint is",
                    "How long ago the run was in the state that its newest verified checkpoint holds.",
                    top("checkpoint_age_seconds"),
                    unit="s",
                    steps=((None, GOOD), (3600, WARN), (14400, BAD)),
                ),
                stat(
                    "Failures",
                    "Generations that ended other than by finishing, since the run began.",
                    f"sum by (run) (max by (run, cause) ({metric('failures_total')}))",
                ),
                stat(
                    "Believed time between failures",
                    "Mean of the posterior; the deep dive has its bounds.",
                    top("mtbf_seconds", labels=_MEAN),
                    unit="s",
                ),
            ),
        ),
        Row(
            title="Is it protected",
            panels=(
                lines(
                    "Steps",
                    "The step that the run is at, and that of its newest verified checkpoint: a failure with the loss "
                    "of all memory costs what lies between.",
                    Query(expr=top("step"), legend="{{run}} step"),
                    Query(expr=top("checkpoint_step"), legend="{{run}} checkpoint"),
                    width=12,
                ),
                lines(
                    "Age of the newest verified checkpoint",
                    "Saws up to the interval between saves. If it rises beyond, saves do not come through.",
                    Query(expr=top("checkpoint_age_seconds")),
                    unit="s",
                    width=6,
                    minimum=0,
                ),
                lines(
                    "Unprotected",
                    "1 while saves fail for longer than RecoveryConfig.unprotected_seconds_max.",
                    Query(expr=top("unprotected")),
                    width=6,
                    minimum=0,
                    maximum=1,
                ),
            ),
        ),
        Row(
            title="Where time goes",
            panels=(
                lines(
                    "Time by kind",
                    "Of each second, how much went into what. All kinds together are all time.",
                    Query(
                        expr=f"sum by (kind) (rate({metric('time_seconds_total')}[{_RATE}])) "
                        f"/ ignoring (kind) group_left sum(rate({metric('time_seconds_total')}[{_RATE}]))",
                        legend="{{kind}}",
                    ),
                    unit="percentunit",
                    stacked=True,
                    width=12,
                    minimum=0,
                    maximum=1,
                ),
                Panel(
                    title="Time since the run began",
                    description="The same, summed up.",
                    kind="bars",
                    unit="s",
                    queries=(
                        Query(
                            expr=total("time_seconds_total", "kind"),
                            legend="{{kind}}",
                        ),
                    ),
                    width=6,
                ),
                lines(
                    "Ratios",
                    "Goodput counts what is new; effective training time (ETTR) counts saving too, and leaves out the "
                    "time without a driver, or not.",
                    Query(expr=top("goodput_ratio"), legend="{{run}} goodput"),
                    Query(expr=top("ettr_ratio"), legend="{{run}} ETTR"),
                    Query(expr=top("ettr_queueing_ratio"), legend="{{run}} ETTR with queueing"),
                    unit="percentunit",
                    width=6,
                    maximum=1,
                ),
            ),
        ),
        Row(
            title="What failures cost",
            panels=(
                Panel(
                    title="Failures by cause",
                    description="Since the run began; causes as in the ledger.",
                    kind="bars",
                    queries=(
                        Query(
                            expr=total("failures_total", "cause") + " > 0",
                            legend="{{cause}}",
                        ),
                    ),
                    width=6,
                    may_be_empty="without failures",
                ),
                Panel(
                    title="Seconds lost by cause",
                    description="Detection, recovery, restoring and training again.",
                    kind="bars",
                    unit="s",
                    queries=(
                        Query(
                            expr=total("lost_seconds_total", "cause") + " > 0",
                            legend="{{cause}}",
                        ),
                    ),
                    width=6,
                    may_be_empty="without failures",
                ),
                Panel(
                    title="Steps lost by cause",
                    description="Steps that were taken back.",
                    kind="bars",
                    queries=(
                        Query(
                            expr=total("lost_steps_total", "cause") + " > 0",
                            legend="{{cause}}",
                        ),
                    ),
                    width=6,
                    may_be_empty="where every failure lost nothing",
                ),
                lines(
                    "Time to recover",
                    "From when a failure struck until all ranks had done a step again; over the range that is shown.",
                    *quantiles("recovery_seconds", by="until", legend="{{until}} "),
                    unit="s",
                    width=6,
                    may_be_empty="without failures in the range",
                ),
            ),
        ),
    ),
)
