"""The state machine of one averaging round at one member: slice assignments, results held, and one decision. Pure: no clock, no network.

The actions of a member, in this order:

1. It sends its contribution to each slice's reducer (``_contribute``); a reducer aggregates the contributions that arrived in time
   (``_reduce``) and sends the result to all members.
2. It reports the results that it holds to the coordinator of the current attempt (``_report``).
3. The coordinator (``_coordinate``) replaces reducers that failed, chooses one result for each slice, and proposes to commit or to discard.
4. Members fetch chosen results that they lack (``_fetch``).
5. The round ends (``_conclude``): committed, discarded, or behind.

The decision is single-decree Paxos (Lamport, "Paxos Made Simple", 2001, section 2) among the members of a fixed roster. An attempt is a
ballot, its number determines its coordinator, and a majority of the roster must accept. A member that is cut off from the majority never
decides: it ends *behind*.
"""

import math
from collections.abc import Mapping, Sequence

from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.messages import (
    CANDIDATES,
    DISCARD,
    MAX_ATTEMPT,
    Ack,
    Assignment,
    Control,
    Decided,
    Effect,
    Finish,
    Hashes,
    Prepare,
    Reduce,
    Report,
    RequestContribution,
    RequestResult,
    Send,
    SendContribution,
    SendResult,
    SlicePlan,
    Vote,
)


class RoundState:
    """The state of one round at member ``me``. Attempt k is coordinated by ``order[k % len(order)]``.

    Each method that reports an observation returns the effects that the caller performs, in order. ``now`` must not decrease between calls.
    Messages from one member to another arrive in order while their link is up; when it goes down, unread ones may be lost.
    """

    def __init__(
        self, me: int, order: Sequence[int], reducers: Sequence[int], timing: RoundTiming, now: float
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
        # the other members
        self._linked: set[int] = set()
        self._lost: dict[int, float] = {}
        self._begun: set[int] = set()
        self._majority_lost_at = math.inf
        # slices
        self._first_reducers = tuple(reducers)
        self._assignments = tuple(Assignment(reducer) for reducer in reducers)
        self._due = [now + timing.contribution_s] * len(reducers)
        """The times at which contributions are due, for the slices that this member reduces."""
        self._contributed: list[set[int]] = [set() for _ in reducers]
        self._taken_over: set[int] = set()
        self._reduced: set[int] = set()
        self._sending_until: dict[tuple[int, int], float] = {}
        """For each (slice, member) to which this member's contribution is being sent: the time until which the member can use it."""
        self._held: list[tuple[bytes, ...]] = [()] * len(reducers)
        self._late_at = [now + timing.replace_reducer_s] * len(reducers)
        """For each slice, the time at which its reducer must have delivered a result."""
        self._progress_at = [-math.inf] * len(reducers)
        self._requests_made = [0] * len(reducers)
        # as an acceptor
        self._promised = 0
        self._promised_at = now
        self._vote: Vote | None = None
        self._reported: Report | None = None
        # as the coordinator of ``_promised``
        self._reports: dict[int, Report] = {}
        self._announced: tuple[Assignment, ...] = ()
        self._proposal: Vote | None = None
        self._acks: set[int] = set()

    def link_up(self, member: int, now: float) -> list[Effect]:
        """Report that this member's own stream to ``member`` is open."""
        self._lost.pop(member, None)
        self._linked.add(member)
        self._send_missed(member)
        return self._advance(now)

    def link_down(self, member: int, now: float) -> list[Effect]:
        """Report that this member's own stream to ``member`` is lost."""
        self._linked.discard(member)
        self._lost.setdefault(member, now)
        if not self.finished:
            self._advance_attempt(now)
        return self._advance(now)

    def begin(self, member: int, now: float) -> list[Effect]:
        """Report that ``member`` has begun this round: its Hello arrived."""
        self._begun.add(member)
        return self._advance(now)

    def receive(self, member: int, message: Control, now: float) -> list[Effect]:
        """Report a control message of ``member``."""
        self._receive(member, message, now)
        return self._advance(now)

    def add_contribution(self, member: int, index: int, now: float) -> list[Effect]:
        """Report that the whole contribution of ``member`` to a slice arrived, or its statement that it makes none."""
        self._contributed[index].add(member)
        return self._advance(now)

    def note_progress(self, index: int, now: float) -> None:
        """Report that a part of a result of a slice arrived or is being verified, so that the result is not requested again."""
        self._progress_at[index] = now

    def hold(self, index: int, result: bytes, now: float) -> list[Effect]:
        """Report that this member has a whole and verified result of a slice, with this hash."""
        if result not in self._held[index]:
            self._held[index] += (result,)
            if index in self._reduced and self.decision is None:
                self._effects.extend(SendResult(member, index, result) for member in self._others())
        return self._advance(now)

    def tick(self, now: float) -> list[Effect]:
        """Report that time has passed. Called once in each heartbeat period."""
        if not self.finished:
            self._advance_attempt(now)
        return self._advance(now, tick=True)

    def wants_contribution(self, member: int, index: int, now: float) -> bool:
        """Whether ``member`` can still use this member's contribution to a slice."""
        return (
            self.decision is None
            and not self.finished
            and now < self._sending_until.get((index, member), now)
        )

    def reduces(self, index: int) -> bool:
        """Whether this member is the reducer of the slice, and has neither begun to reduce it nor received a result."""
        return (
            self._assignments[index].reducer == self._me
            and index not in self._reduced
            and not self._held[index]
        )

    def accepts_result(self, member: int, index: int, result: bytes) -> bool:
        """Whether to receive a result from ``member``: one that is not held yet, and is the chosen one or comes from the slice's reducer."""
        if result in self._held[index]:
            return False
        if self.decision is not None:
            return bool(self.decision) and result == self.decision[index]
        assignment = self._assignments[index]
        return result == assignment.chosen or (
            member == assignment.reducer and len(self._held[index]) < CANDIDATES
        )

    def _advance(self, now: float, *, tick: bool = False) -> list[Effect]:
        """Take all actions that the state requires, and return the effects since the last call. Idempotent."""
        if not self.finished:
            self._advance_slices_and_vote(now, tick=tick)
        effects, self._effects = self._effects, []
        return effects

    def _advance_slices_and_vote(self, now: float, *, tick: bool) -> None:
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

    def _send_missed(self, member: int) -> None:
        """Send the messages that a member may have missed before its link came up."""
        if self.finished:
            return
        for key in [key for key in self._sending_until if key[1] == member]:
            del self._sending_until[key]
        if self.decision is not None:
            self._send(member, Decided(self.decision))
        elif self._coordinator(self._promised) == self._me:
            self._send(member, Prepare(self._promised))
            if self._announced:
                self._send(member, SlicePlan(self._promised, self._announced))
            if self._proposal is not None:
                self._send(member, self._proposal)
        elif self._coordinator(self._promised) == member:
            self._report(again=True)
        for index, assignment in enumerate(self._assignments):
            if assignment.reducer == self._me:
                self._effects.extend(SendResult(member, index, result) for result in self._held[index])
                if index in self._taken_over and self.reduces(index):
                    self._send(member, RequestContribution(index))

    def _receive(self, member: int, message: Control, now: float) -> None:
        if self.decision is not None and isinstance(message, Prepare | Report | Vote | SlicePlan):
            self._send(member, Decided(self.decision))
            return
        match message:
            case Decided(hashes):
                self.decision = hashes if self.decision is None else self.decision
            case RequestResult(index, result):
                if result in self._held[index]:
                    self._effects.append(SendResult(member, index, result))
            case RequestContribution(index):
                self._sending_until.pop((index, member), None)
                self._send_contribution(member, index, now + self._timing.contribution_s, now)
            case Ack(attempt):
                if attempt == self._promised:
                    self._acks.add(member)
            case Prepare(attempt) | Report(attempt) | SlicePlan(attempt) | Vote(attempt):
                self._promise(attempt, now)
                if attempt < self._promised:
                    self._send(member, Prepare(self._promised))
                elif attempt == self._promised:
                    self._receive_current(member, message, now)

    def _receive_current(self, member: int, message: Prepare | Report | SlicePlan | Vote, now: float) -> None:
        """Process a message of the current attempt."""
        coordinator = self._coordinator(self._promised)
        match message:
            case Prepare():
                self._report(again=True)
            case Report() if coordinator == self._me:
                self._reports[member] = message
                if message.vote is not None and message.vote == self._proposal:
                    self._acks.add(member)
            case SlicePlan() if coordinator == member:
                self._adopt(message.assignments, now)
            case Vote() if coordinator == member:
                self._vote = message
                self._reported = self._own_report()  # the Ack implies it
                self._send(member, Ack(message.attempt))

    # ---- attempts ---------------------------------------------------------------------------------------

    def _coordinator(self, attempt: int) -> int:
        return self._order[attempt % len(self._order)]

    def _advance_attempt(self, now: float) -> None:
        """Advance to the next attempt with a live coordinator, if the present coordinator is lost or out of time.

        Called only at a tick or a lost link: if messages advanced attempts, two members could outbid each other forever.
        """
        if self.decision is not None:
            return
        attempt = self._promised
        if now >= max(self._promised_at, self._began + self._timing.majority_s) + self._timing.attempt_s:
            attempt += 1
        while not self._takes_part(self._coordinator(attempt), now):
            attempt += 1
        self._promise(attempt, now)

    def _takes_part(self, member: int, now: float) -> bool:
        """Whether a member is reachable, and has begun this round or may still begin it."""
        begun = member in self._begun or now < self._began + self._timing.contribution_s
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

    # ---- slices -----------------------------------------------------------------------------------------

    def _contribute(self, now: float) -> None:
        for index, reducer in enumerate(self._first_reducers):
            self._send_contribution(reducer, index, self._began + self._timing.contribution_s, now)

    def _send_contribution(self, member: int, index: int, until: float, now: float) -> None:
        if member == self._me:
            self._contributed[index].add(member)
        elif member in self._linked and (index, member) not in self._sending_until and now < until:
            self._sending_until[index, member] = until
            self._effects.append(SendContribution(member, index))

    def _adopt(self, assignments: tuple[Assignment, ...], now: float) -> None:
        """Adopt a plan. A member that becomes the reducer of a slice requests the contributions to it."""
        before, self._assignments = self._assignments, assignments
        for index, assignment in enumerate(assignments):
            if assignment.reducer != before[index].reducer:
                self._late_at[index] = now + self._timing.replace_reducer_s - self._timing.contribution_s
            if assignment.reducer == self._me != before[index].reducer and not self._held[index]:
                self._taken_over.add(index)
                self._contributed[index].add(self._me)
                left_s = self._began + self._timing.majority_s - now
                self._due[index] = now + min(self._timing.contribution_s, left_s / 2)
                self._broadcast(RequestContribution(index))

    def _reduce(self, now: float) -> None:
        for index in range(len(self._assignments)):
            if not self.reduces(index):
                continue
            awaited = [
                m for m in self._members if self._takes_part(m, now) and m not in self._contributed[index]
            ]
            if not awaited or now >= self._due[index]:
                self._reduced.add(index)
                self._effects.append(Reduce(index, tuple(sorted(self._contributed[index]))))

    def _fetch(self, now: float) -> None:
        """Request chosen results that are missing and are not being sent."""
        if self.decision == DISCARD:
            return
        for index, assignment in enumerate(self._assignments):
            wanted = self.decision[index] if self.decision else assignment.chosen
            if not wanted or wanted in self._held[index]:
                continue
            expected = self.decision is None and assignment.reducer not in self._lost
            if expected and self._progress_at[index] == -math.inf:
                self._progress_at[index] = now
            if now - self._progress_at[index] >= self._timing.silence_s and (others := self._others()):
                tries = self._requests_made[index]
                holder = (
                    assignment.holder
                    if tries == 0 and assignment.holder in others
                    else others[tries % len(others)]
                )
                self._requests_made[index] += 1
                self._progress_at[index] = now
                self._send(holder, RequestResult(index, wanted))

    # ---- as coordinator ---------------------------------------------------------------------------------

    def _coordinate(self, now: float, *, tick: bool) -> None:
        reports = {member: self._reports[member] for member in sorted(self._reports)}
        reports[self._me] = self._own_report()
        if len(reports) < self._majority:
            return
        if self._proposal is None:
            live = [member for member in self._members if self._takes_part(member, now)]
            replaced = [
                index for index in range(len(self._assignments)) if self._must_be_replaced(index, now)
            ]
            assignments = plan(self._assignments, reports, live, replaced)
            self._adopt(assignments, now)
            if tick and assignments != self._announced:
                self._announced = assignments
                self._broadcast(SlicePlan(self._promised, assignments))
            majority_suffices = now >= self._began + self._timing.majority_s
            hashes = propose(
                assignments, reports, live, majority=self._majority, majority_suffices=majority_suffices
            )
            if hashes is None:
                return
            self._proposal = self._vote = Vote(self._promised, hashes)
            self._acks.add(self._me)
            self._broadcast(self._proposal)
        if len(self._acks) >= self._majority:
            self.decision = self._proposal.hashes
            self._broadcast(Decided(self.decision))

    def _must_be_replaced(self, index: int, now: float) -> bool:
        """Whether the reducer of a slice is lost, has not begun the round, or is late with its result."""
        reducer = self._assignments[index].reducer
        if reducer in self._lost:  # within two heartbeats, a member that has its result reports it
            return now - self._lost[reducer] >= 2 * self._timing.heartbeat_s
        arriving = now - self._progress_at[index] < self._timing.silence_s
        return not self._takes_part(reducer, now) or (now >= self._late_at[index] and not arriving)

    # ---- the end ----------------------------------------------------------------------------------------

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
                "committed, but results did not arrive in time" if self.decision else "no decision in time",
            )
        elif now - self._majority_lost_at >= self._timing.give_up_s:
            self._finish(None, f"only {left} of {len(self._members)} members are left, a majority is not")

    def _finish(self, hashes: Hashes | None, reason: str) -> None:
        self.finished = True
        self._effects.append(Finish(hashes, reason))


Reports = Mapping[int, Report]
"""The reports of one attempt by member, including the coordinator's own."""


def plan(
    assignments: Sequence[Assignment], reports: Reports, live: Sequence[int], replaced: Sequence[int]
) -> tuple[Assignment, ...]:
    """The assignments of all slices: the choice of a result if a live member holds one, otherwise a new reducer for slices in ``replaced``.

    A chosen result stays chosen while a live member holds it. The new reducer is the live member with the fewest slices.
    """
    reporting = [member for member in live if member in reports]
    planned = list(assignments)
    for index, assignment in enumerate(assignments):
        holders = [member for member in reporting if reports[member].held[index]]
        if holders:
            planned[index] = _with_result(index, assignment, {member: reports[member] for member in holders})
        elif index in replaced:
            load = [each.reducer for each in planned]
            candidates = [member for member in reporting if member != assignment.reducer] or [
                assignment.reducer
            ]
            planned[index] = Assignment(min(candidates, key=lambda member: (load.count(member), member)))
        else:
            planned[index] = Assignment(assignment.reducer)
    return tuple(planned)


def _with_result(index: int, assignment: Assignment, holding: Reports) -> Assignment:
    first = assignment.reducer if assignment.reducer in holding else min(holding)
    if any(assignment.chosen in report.held[index] for report in holding.values()):
        chosen = assignment.chosen
    else:
        chosen = holding[first].held[index][0]
    holders = [member for member, report in holding.items() if chosen in report.held[index]]
    return Assignment(
        assignment.reducer, chosen, assignment.reducer if assignment.reducer in holders else min(holders)
    )


def propose(
    assignments: Sequence[Assignment],
    reports: Reports,
    live: Sequence[int],
    *,
    majority: int,
    majority_suffices: bool,
) -> Hashes | None:
    """The proposal of the coordinator, given reports from a majority; None if it is too early for one.

    If the reports contain votes, that of the latest attempt must be proposed again (Paxos). Otherwise the proposal is COMMIT once all live
    members hold all results. From ``majority_s`` on (``majority_suffices``) a majority of holders is enough, and without one it is DISCARD.
    """
    votes = [report.vote for report in reports.values() if report.vote is not None]
    if votes:
        return max(votes, key=lambda vote: vote.attempt).hashes
    chosen = tuple(assignment.chosen for assignment in assignments)
    complete = [member for member in live if member in reports and _holds_all(reports[member], chosen)]
    if len(complete) >= majority and (majority_suffices or complete == list(live)):
        return chosen
    return DISCARD if majority_suffices else None


def _holds_all(report: Report, hashes: Hashes) -> bool:
    return all(result in held for result, held in zip(hashes, report.held, strict=True))
