"""A notice: one save, one hand-over in time, and nothing charged for what was announced."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.decide.notices import HandOver, Notice, Notices, WantSave

DRAIN = Notice(target="node a", node="a", ranks=(0, 1), agents=("x", "y"), reason="drain", at=100.0, deadline_at=130.0)
OTHER = replace(DRAIN, target="node b", node="b", ranks=(2,), agents=("z",))
RANK = replace(DRAIN, target="rank 3", node="c", ranks=(3,), agents=(), reason="sigterm")


def test_a_notice_is_answered_with_a_save_and_then_a_hand_over() -> None:
    notices = Notices()
    assert notices.noticed(DRAIN, running=True, room=True) == [WantSave()]
    assert notices.saved(120, room=True, now=101.0) == [HandOver(notices=(DRAIN,), saved_step=120)]
    assert notices.generation_ended(room=True, now=102.0) == ("x", "y")


def test_repeats_change_nothing() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    assert notices.noticed(replace(DRAIN, at=105.0), running=True, room=True) == []
    notices.saved(120, room=True, now=101.0)
    assert notices.noticed(DRAIN, running=True, room=True) == []


def test_notices_that_come_together_share_the_save_and_the_hand_over() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    assert notices.noticed(OTHER, running=True, room=True) == []
    assert notices.saved(120, room=True, now=101.0) == [HandOver(notices=(DRAIN, OTHER), saved_step=120)]


def test_the_hand_over_comes_before_the_deadline_if_no_save_does() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    assert notices.wakeup_at == 128.0
    assert notices.tick(room=True, now=127.9) == []
    assert notices.tick(room=True, now=128.0) == [HandOver(notices=(DRAIN,), saved_step=None)]


def test_a_short_notice_leaves_most_of_its_time_to_the_save() -> None:
    notices = Notices()
    notices.noticed(replace(DRAIN, deadline_at=101.0), running=True, room=True)
    assert notices.wakeup_at == 100.8


def test_without_room_elsewhere_the_ranks_train_on_until_there_is() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    assert notices.nodes == {"a"}
    assert notices.saved(120, room=False, now=101.0) == []
    assert notices.tick(room=False, now=105.0) == []
    assert notices.tick(room=True, now=106.0) == [WantSave()]
    assert notices.tick(room=True, now=107.0) == []
    assert notices.saved(150, room=True, now=107.0) == [HandOver(notices=(DRAIN,), saved_step=150)]


def test_without_room_elsewhere_the_last_save_comes_shortly_before_the_deadline() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    notices.saved(120, room=False, now=101.0)
    assert notices.wakeup_at == 115.0
    assert notices.tick(room=False, now=115.0) == [WantSave()]
    assert notices.saved(160, room=False, now=116.0) == [HandOver(notices=(DRAIN,), saved_step=160)]


def test_without_room_elsewhere_a_failure_does_not_drive_the_ranks_away() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=False)
    assert notices.generation_ended(room=False, now=105.0) == ()
    notices.generation_started()
    assert notices.tick(room=True, now=110.0) == [WantSave()]
    assert notices.generation_ended(room=True, now=111.0) == ("x", "y")


def test_what_was_saved_counts_if_the_last_save_fails() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    notices.saved(120, room=False, now=101.0)
    notices.tick(room=False, now=115.0)
    assert notices.not_saved(room=False, now=116.0) == [HandOver(notices=(DRAIN,), saved_step=120)]


def test_a_second_notice_is_answered_with_another_save_while_the_first_one_waits_for_room() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    notices.saved(120, room=False, now=101.0)
    assert notices.noticed(RANK, running=True, room=True) == [WantSave()]


def test_a_process_that_got_sigterm_needs_no_room() -> None:
    notices = Notices()
    notices.noticed(RANK, running=True, room=True)
    assert notices.saved(120, room=False, now=101.0) == [HandOver(notices=(RANK,), saved_step=120)]


def test_a_save_that_was_given_up_is_waited_for_no_longer() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    assert notices.not_saved(room=True, now=101.0) == [HandOver(notices=(DRAIN,), saved_step=None)]


def test_where_nothing_runs_there_is_nothing_to_save() -> None:
    notices = Notices()
    assert notices.noticed(DRAIN, running=False, room=True) == [HandOver(notices=(DRAIN,), saved_step=None)]


def test_a_death_that_was_announced_is_told_from_one_that_was_not() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    assert notices.covers(1, "agent_lost") == DRAIN
    assert notices.covers(2, "agent_lost") is None
    assert notices.covers(1, "exception") is None


def test_a_rank_that_is_replaced_in_its_place_leaves_no_agent_behind() -> None:
    notices = Notices()
    notices.noticed(RANK, running=True, room=True)
    notices.saved(120, room=True, now=101.0)
    assert notices.generation_ended(room=True, now=102.0) == ()
    notices.generation_started()
    assert notices.covers(3, "signal") is None


def test_a_notice_is_over_when_its_agents_are_gone() -> None:
    notices = Notices()
    notices.noticed(DRAIN, running=True, room=True)
    notices.saved(120, room=True, now=101.0)
    notices.members_are(frozenset({"y", "z"}))
    assert notices.covers(1, "signal") == DRAIN
    notices.members_are(frozenset({"z"}))
    assert notices.covers(1, "signal") is None


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens when: no notice is left without a hand-over past its time, and none gets two."""

    def __init__(self) -> None:
        super().__init__()
        self.notices = Notices()
        self.now = 0.0
        self.count = 0
        self.handed: list[str] = []
        self.room = True

    def take(self, decisions: list[WantSave | HandOver]) -> None:
        for decision in decisions:
            if isinstance(decision, HandOver):
                self.handed += [notice.target for notice in decision.notices]

    @rule(seconds=st.floats(0.0, 60.0), running=st.booleans())
    def noticed(self, seconds: float, running: bool) -> None:
        self.count += 1
        notice = replace(
            DRAIN, target=f"t{self.count}", agents=(f"a{self.count}",), at=self.now, deadline_at=self.now + seconds
        )
        self.take(self.notices.noticed(notice, running=running, room=self.room))

    @rule(seconds=st.floats(0.1, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.notices.tick(room=self.room, now=self.now))
        assert self.notices.wakeup_at is None or self.notices.wakeup_at > self.now

    @rule(room=st.booleans())
    def room_changes(self, room: bool) -> None:
        self.room = room

    @rule()
    def saved(self) -> None:
        self.take(self.notices.saved(1, room=self.room, now=self.now))

    @rule()
    def not_saved(self) -> None:
        self.take(self.notices.not_saved(room=True, now=101.0))

    @rule()
    def ended(self) -> None:
        leaving = self.notices.generation_ended(room=self.room, now=self.now)
        assert not self.room or self.notices.wakeup_at is None
        known = {f"t{number}" for number in range(self.count + 1) if self.notices.knows(f"t{number}")}
        assert {agent.replace("a", "t") for agent in leaving} <= known
        assert len(leaving) >= len(known.intersection(self.handed))

    @rule()
    def regrouped(self) -> None:
        self.notices.members_are(frozenset())

    @invariant()
    def nobody_is_handed_over_twice(self) -> None:
        assert len(self.handed) == len(set(self.handed))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
