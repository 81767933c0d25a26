"""A round, as one member sees it: who reduces what, who holds which result, and one decision. Pure: no clock, no network.

The decision is single-decree Paxos (Lamport, "Paxos Made Simple", 2001, section 2) among the members of a fixed roster: an attempt is a
ballot, its coordinator follows from its number, and a majority of the roster must accept. What is not decided with a
majority is not decided: a member cut off from it ends *behind*, not with a decision of its own.
"""

import math
from collections.abc import Sequence

from swarmnet_protocols.training.rounds.events import (
    Began,
    Contributed,
    Effect,
    Event,
    Finish,
    Holds,
    LinkDown,
    LinkUp,
    Received,
    Receiving,
    Reduce,
    RoundTiming,
    Send,
    SendContribution,
    SendResult,
    Tick,
)
from swarmnet_protocols.training.rounds.messages import (
    CANDIDATES,
    DISCARD,
    MAX_ATTEMPT,
    Ack,
    Call,
    Control,
    Decided,
    Hashes,
    Plan,
    Prepare,
    Report,
    Slot,
    Vote,
    Want,
)
from swarmnet_protocols.training.rounds.plans import plan, propose


class Round:
    """The state of one round at member ``me``. ``order`` gives the coordinators: attempt k belongs to ``order[k % members]``.

    What one member sends another arrives in order while their link is up; when it goes down the rest may be lost.
    """

    def __init__(
        self, me: int, order: Sequence[int], owners: Sequence[int], timing: RoundTiming, now: float
    ) -> None:
        self.decision: Hashes | None = None
        self.finished = False
        self._me = me
        self._order = tuple(order)
        self._members = range(len(order))
        self._majority = len(order) // 2 + 1
        self._timing = timing
        self._began = now
        self._effects: list[Effect] = []
        # the others
        self._linked: set[int] = set()
        self._lost: dict[int, float] = {}
        self._heard: set[int] = set()
        self._majority_lost_at = math.inf
        # slices
        self._first_owners = tuple(owners)
        self._slots = tuple(Slot(owner) for owner in owners)
        self._due = [now + timing.contribution_s] * len(
            owners
        )  # of contributions, where this member is the owner
        self._contributed: list[set[int]] = [set() for _ in owners]
        self._taken_over: set[int] = set()
        self._reduced: set[int] = set()
        self._offered: dict[tuple[int, int], float] = {}  # until when a member may still have our slice
        self._held: list[tuple[bytes, ...]] = [()] * len(owners)
        self._late_at = [now + timing.late_s] * len(owners)  # when its owner must have delivered a result
        self._progress_at = [-math.inf] * len(owners)
        self._asked = [0] * len(owners)
        # as an acceptor
        self._promised = 0
        self._promised_at = now
        self._vote: Vote | None = None
        self._reported: Report | None = None
        # as the coordinator of ``_promised``
        self._reports: dict[int, Report] = {}
        self._announced: tuple[Slot, ...] = ()
        self._proposal: Vote | None = None
        self._acks: set[int] = set()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; what is to be done about it, in order. ``now`` never goes back."""
        match event:
            case LinkUp(member):
                self._lost.pop(member, None)
                self._linked.add(member)
                self._greet(member)
            case LinkDown(member):
                self._linked.discard(member)
                self._lost.setdefault(member, now)
            case Began(member):
                self._heard.add(member)
            case Received(member, message):
                self._receive(member, message, now)
            case Contributed(index, member):
                self._contributed[index].add(member)
            case Receiving(index):
                self._progress_at[index] = now
            case Holds(index, result):
                self._hold(index, result)
            case Tick():
                pass
        if not self.finished and not isinstance(event, Receiving):
            if isinstance(event, Tick | LinkDown):  # no faster, lest two members outbid each other
                self._follow(now)
            self._advance(now, tick=isinstance(event, Tick))
        effects, self._effects = self._effects, []
        return effects

    def wants_contribution(self, member: int, index: int, now: float) -> bool:
        """Whether it is still of use to send ``member`` this member's contribution to a slice."""
        return self.decision is None and not self.finished and now < self._offered.get((index, member), now)

    def owns(self, index: int) -> bool:
        """Whether contributions to this slice are for this member to reduce, and it has not yet begun to."""
        return self._slots[index].owner == self._me and index not in self._reduced and not self._held[index]

    def accepts_result(self, member: int, index: int, result: bytes) -> bool:
        """Whether a result offered by ``member`` is to be taken: it is new, and its owner's or the chosen one."""
        if result in self._held[index]:
            return False
        if self.decision is not None:
            return bool(self.decision) and result == self.decision[index]
        slot = self._slots[index]
        return result == slot.chosen or (member == slot.owner and len(self._held[index]) < CANDIDATES)

    def _advance(self, now: float, *, tick: bool) -> None:
        """Do whatever the facts call for. The facts are complete: doing it twice changes nothing."""
        if self.decision is None:
            self._contribute(now)
            self._reduce(now)
            if self._coordinator(self._promised) == self._me:
                self._coordinate(now, tick=tick)
            elif tick or all(self._held):
                self._report()
        self._fetch(now)
        self._conclude(now)

    def _others(self) -> list[int]:
        return sorted(self._linked)

    def _send(self, member: int, message: Control) -> None:
        self._effects.append(Send(member, message))

    def _broadcast(self, message: Control) -> None:
        for member in self._others():
            self._send(member, message)

    def _greet(self, member: int) -> None:
        """Bring a member that can be reached now, or again, up to date."""
        if self.finished:
            return
        for offer in [offer for offer in self._offered if offer[1] == member]:
            del self._offered[offer]
        if self.decision is not None:
            self._send(member, Decided(self.decision))
        elif self._coordinator(self._promised) == self._me:
            self._send(member, Prepare(self._promised))
            if self._announced:
                self._send(member, Plan(self._promised, self._announced))
            if self._proposal is not None:
                self._send(member, self._proposal)
        elif self._coordinator(self._promised) == member:
            self._report(again=True)
        for index, slot in enumerate(self._slots):
            if slot.owner == self._me:
                self._effects.extend(SendResult(member, index, result) for result in self._held[index])
                if index in self._taken_over and self.owns(index):
                    self._send(member, Call(index))

    def _receive(self, member: int, message: Control, now: float) -> None:
        if self.decision is not None and isinstance(message, Prepare | Report | Vote | Plan):
            self._send(member, Decided(self.decision))
            return
        match message:
            case Decided(hashes):
                self.decision = hashes if self.decision is None else self.decision
            case Want(index, result):
                if result in self._held[index]:
                    self._effects.append(SendResult(member, index, result))
            case Call(index):
                self._offered.pop((index, member), None)
                self._offer(member, index, now + self._timing.contribution_s, now)
            case Ack(attempt):
                if attempt == self._promised:
                    self._acks.add(member)
            case Prepare(attempt) | Report(attempt) | Plan(attempt) | Vote(attempt):
                self._promise(attempt, now)
                if attempt < self._promised:
                    self._send(member, Prepare(self._promised))
                elif attempt == self._promised:
                    self._heed(member, message, now)

    def _heed(self, member: int, message: Prepare | Report | Plan | Vote, now: float) -> None:
        """A message of the attempt this member is in."""
        leads = self._coordinator(self._promised)
        match message:
            case Prepare():
                self._report(again=True)
            case Report() if leads == self._me:
                self._reports[member] = message
                if message.vote is not None and message.vote == self._proposal:
                    self._acks.add(member)
            case Plan() if leads == member:
                self._adopt(message.slots, now)
            case Vote() if leads == member:
                self._vote = message
                self._reported = self._own_report()  # which the Ack says as well
                self._send(member, Ack(message.attempt))

    # attempts

    def _coordinator(self, attempt: int) -> int:
        return self._order[attempt % len(self._order)]

    def _follow(self, now: float) -> None:
        """Go on to the next attempt that somebody may lead, if nobody leads this one."""
        if self.decision is not None:
            return
        attempt = self._promised
        if now >= max(self._promised_at, self._began + self._timing.settle_s) + self._timing.attempt_s:
            attempt += 1
        while not self._takes_part(self._coordinator(attempt), now):
            attempt += 1
        self._promise(attempt, now)

    def _takes_part(self, member: int, now: float) -> bool:
        """Whether a member is there, and has begun this round or still may."""
        begun = member in self._heard or now < self._began + self._timing.contribution_s
        return member == self._me or (member not in self._lost and begun)

    def _promise(self, attempt: int, now: float) -> None:
        if not self._promised < attempt < MAX_ATTEMPT:
            return
        self._promised, self._promised_at = attempt, now
        self._reported = None
        self._reports, self._announced, self._proposal, self._acks = {}, (), None, set()
        if self._coordinator(attempt) == self._me:
            self._broadcast(Prepare(attempt))
        else:
            self._report()

    def _own_report(self) -> Report:
        return Report(self._promised, tuple(self._held), self._vote)

    def _report(self, *, again: bool = False) -> None:
        coordinator = self._coordinator(self._promised)
        report = self._own_report()
        if coordinator in self._linked and (again or report != self._reported):
            self._reported = report
            self._send(coordinator, report)

    # slices

    def _contribute(self, now: float) -> None:
        for index, owner in enumerate(self._first_owners):
            self._offer(owner, index, self._began + self._timing.contribution_s, now)

    def _offer(self, member: int, index: int, until: float, now: float) -> None:
        if member == self._me:
            self._contributed[index].add(member)
        elif member in self._linked and (index, member) not in self._offered and now < until:
            self._offered[index, member] = until
            self._effects.append(SendContribution(member, index))

    def _adopt(self, slots: tuple[Slot, ...], now: float) -> None:
        """Take on a plan; whoever owns a slice by it, and did not before, calls for the contributions."""
        before, self._slots = self._slots, slots
        for index, slot in enumerate(slots):
            if slot.owner != before[index].owner:
                self._late_at[index] = now + self._timing.late_s - self._timing.contribution_s
            if slot.owner == self._me != before[index].owner and not self._held[index]:
                self._taken_over.add(index)
                self._contributed[index].add(self._me)
                left_s = self._began + self._timing.settle_s - now
                self._due[index] = now + min(self._timing.contribution_s, left_s / 2)
                self._broadcast(Call(index))

    def _reduce(self, now: float) -> None:
        for index in range(len(self._slots)):
            if not self.owns(index):
                continue
            awaited = [
                m for m in self._members if self._takes_part(m, now) and m not in self._contributed[index]
            ]
            if not awaited or now >= self._due[index]:
                self._reduced.add(index)
                self._effects.append(Reduce(index, tuple(sorted(self._contributed[index]))))

    def _hold(self, index: int, result: bytes) -> None:
        if result in self._held[index]:
            return
        self._held[index] += (result,)
        if index in self._reduced and self.decision is None:
            self._effects.extend(SendResult(member, index, result) for member in self._others())

    def _fetch(self, now: float) -> None:
        """Ask for a result that is to be had and does not come by itself."""
        if self.decision == DISCARD:
            return
        for index, slot in enumerate(self._slots):
            wanted = self.decision[index] if self.decision else slot.chosen
            if not wanted or wanted in self._held[index]:
                continue
            coming = self.decision is None and slot.owner not in self._lost
            if coming and self._progress_at[index] == -math.inf:
                self._progress_at[index] = now
            if now - self._progress_at[index] >= self._timing.silence_s and (others := self._others()):
                tries = self._asked[index]
                holder = slot.holder if tries == 0 and slot.holder in others else others[tries % len(others)]
                self._asked[index] += 1
                self._progress_at[index] = now
                self._send(holder, Want(index, wanted))

    # the coordinator

    def _coordinate(self, now: float, *, tick: bool) -> None:
        reports = {member: self._reports[member] for member in sorted(self._reports)}
        reports[self._me] = self._own_report()
        if len(reports) < self._majority:
            return
        if self._proposal is None:
            live = [member for member in self._members if self._takes_part(member, now)]
            replaced = [index for index in range(len(self._slots)) if self._is_to_be_replaced(index, now)]
            slots = plan(self._slots, reports, live, replaced)
            self._adopt(slots, now)
            if tick and slots != self._announced:
                self._announced = slots
                self._broadcast(Plan(self._promised, slots))
            settled = now >= self._began + self._timing.settle_s
            hashes = propose(slots, reports, live, majority=self._majority, settled=settled)
            if hashes is None:
                return
            self._proposal = self._vote = Vote(self._promised, hashes)
            self._acks.add(self._me)
            self._broadcast(self._proposal)
        if len(self._acks) >= self._majority:
            self.decision = self._proposal.hashes
            self._broadcast(Decided(self.decision))

    def _is_to_be_replaced(self, index: int, now: float) -> bool:
        """Whether somebody else is to reduce a slice, whose owner is lost, absent, or there and does not deliver."""
        owner = self._slots[index].owner
        if owner in self._lost:  # a member that has its result has had two beats to say so
            return now - self._lost[owner] >= 2 * self._timing.heartbeat_s
        coming = now - self._progress_at[index] < self._timing.silence_s
        return not self._takes_part(owner, now) or (now >= self._late_at[index] and not coming)

    # the end

    def _conclude(self, now: float) -> None:
        left = len(self._members) - len(self._lost)
        self._majority_lost_at = min(self._majority_lost_at, now) if left < self._majority else math.inf
        if self.decision == DISCARD:
            empty = [index for index, held in enumerate(self._held) if not held]
            self._finish(DISCARD, f"discarded: no result of slices {empty}" if empty else "discarded")
        elif self.decision and all(
            result in held for result, held in zip(self.decision, self._held, strict=True)
        ):
            self._finish(self.decision, f"committed in attempt {self._promised}")
        elif now >= self._began + self._timing.deadline_s:
            self._finish(
                None,
                "committed, but results did not come in time" if self.decision else "no decision in time",
            )
        elif now - self._majority_lost_at >= self._timing.give_up_s:
            self._finish(None, f"only {left} of {len(self._members)} members are left, a majority is not")

    def _finish(self, hashes: Hashes | None, reason: str) -> None:
        self.finished = True
        self._effects.append(Finish(hashes, reason))
