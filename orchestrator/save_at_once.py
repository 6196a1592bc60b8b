"""Has all ranks save the same step as soon as they can; the wiring of decide/save_order.py.

For whoever wants a save out of turn: a notice, a suspected fault. `want()` may be called at any time and by several.
"""

import logging
import time
from collections.abc import Callable, Sequence

from orchestrator.decide.rendezvous import Rendezvous
from orchestrator.decide.save_order import Decision, OrderSave, SaveDone, SaveOrder
from orchestrator.observe.ledger import Ledger
from workers.messages import Command, SaveAt, SaveRefused

logger = logging.getLogger("lastgood")


class SaveAtOnce:
    """`post(agent, command)` sends a command. `on_done` is called when what was wanted is committed or given up; the
    end of the generation in between ends the wish as well, without a call."""

    def __init__(
        self, *, ledger: Ledger, rendezvous: Rendezvous, generation: int, post: Callable[[str, Command], None]
    ) -> None:
        self._ledger = ledger
        self._rendezvous = rendezvous
        self._post = post
        self._order = SaveOrder()
        self._order.generation_started(generation, -1)
        self.on_done: list[Callable[[SaveDone], None]] = []

    def want(self) -> None:
        self._carry_out(self._order.want())

    def generation_started(self, generation: int, restored_step: int) -> None:
        self._order.generation_started(generation, restored_step)

    def progressed(self, generation: int, step: int) -> None:
        self._carry_out(self._order.progressed(generation, step, at=time.monotonic()))

    def refused(self, event: SaveRefused) -> None:
        self._carry_out(self._order.refused(event.generation, event.step, event.newest_step))

    def committed(self, generation: int, step: int) -> None:
        self._carry_out(self._order.committed(generation, step))

    def given_up(self, generation: int, step: int, reason: str) -> None:
        self._carry_out(self._order.not_saved(generation, step, reason))

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case OrderSave():
                    self._ledger.append("save_ordered", generation=decision.generation, step=decision.step)
                    for member in self._rendezvous.members.values():
                        self._post(member.joined.agent, SaveAt(generation=decision.generation, step=decision.step))
                case SaveDone():
                    if not decision.committed:
                        logger.warning("lastgood: the save that was wanted at once was given up: %s", decision.reason)
                    for call in self.on_done:
                        call(decision)
