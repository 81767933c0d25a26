"""The state machine of one averaging round at one member. Pure: no clock, no network.

It handles slice assignments, held results, and one decision. The actions of a member, in this
order:

1. It sends its contribution to each slice's reducer (``_contribute``). A reducer aggregates the
   contributions that arrived in time (``_reduce``) and sends the result to all members.
2. It reports the results that it holds to the coordinator (``_report``).
3. The coordinator (``_coordinate``) replaces reducers that failed, chooses one result for each
   slice, and proposes to commit or to discard (``slice_plans.py``).
4. Members fetch chosen results that they lack (``_fetch``), and vote (``_cast``). They vote to
   commit only what they hold.
5. The votes of a majority decide (``votes.py``). The round ends (``_conclude``): committed,
   discarded, or behind.

Attempt k has the coordinator ``order[k % len(order)]``. Each member goes to the first attempt whose
coordinator takes part, as far as it can tell. It announces the attempt if it is not the first. A
member passes over a coordinator if so many others have passed over it that no majority is left.
After ``majority_s``, time itself moves members to later attempts. So a silent coordinator is passed
over, too.

Members at different attempts only delay the round. Every member votes once, so at most one outcome
has the votes of a majority. A member that is cut off from the majority ends *behind*.
"""

import math
from collections.abc import Sequence

from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.messages import (
    CANDIDATES,
    DISCARD,
    Accusation,
    Assignment,
    Control,
    Decided,
    Effect,
    Finish,
    Hashes,
    Prepare,
    Proposal,
    Reduce,
    Refute,
    Report,
    RequestContribution,
    RequestResult,
    Send,
    SendContribution,
    SendResult,
    SlicePlan,
    Vote,
)
from swarmnet_protocols.training.rounds.slice_plans import claims, plan, propose, propose_again
from swarmnet_protocols.training.rounds.states import MemberState, SliceState
from swarmnet_protocols.training.rounds.votes import Electorate, Votes

MAX_HELD = 2 * CANDIDATES
"""Most results of one slice that a member keeps before the decision.

They come from its reducers, or were fetched.
"""


class RoundState:
    """The state of one round at one member.

    ``order``: the members in the order in which they coordinate the round. Each method that reports
    an observation returns the effects that the caller performs, in order. ``now`` must not decrease
    between calls. Messages from one member to another arrive in order while their link is up. When
    the link goes down, unread messages may be lost.
    """

    def __init__(
        self,
        electorate: Electorate,
        order: Sequence[int],
        reducers: Sequence[int],
        timing: RoundTiming,
        now: float,
    ) -> None:
        self.finished = False
        self._me = electorate.me
        self._order = tuple(order)
        self._majority = electorate.majority
        self._votes = Votes(electorate)
        self._timing = timing
        self._began = now
        self._effects: list[Effect] = []
        self._slices = [SliceState.first(self._me, reducer, timing, now) for reducer in reducers]
        self._members = [MemberState() for _ in order]
        self._majority_lost_at = math.inf
        self._attempt = 0
        self._proposed: Proposal | None = None
        """The proposal of the coordinator, which may be this member."""
        self._reported: Report | None = None
        self._announced: tuple[Assignment, ...] = ()
        """The plan that this member has sent as the coordinator."""

    @property
    def _coordinator(self) -> int:
        return self._order[self._attempt % len(self._order)]

    @property
    def decision(self) -> Hashes | None:
        """The outcome of the round; None until a majority has decided it."""
        return None if self._votes.decided is None else self._votes.decided.hashes

    @property
    def is_whole(self) -> bool:
        """True if all members take part, and none has been lost."""
        others = (each for number, each in enumerate(self._members) if number != self._me)
        return all(each.has_begun and each.is_linked for each in others)

    def link_up(self, member: int, now: float) -> list[Effect]:
        """Report that this member's own stream to ``member`` is open."""
        self._members[member].is_linked, self._members[member].lost_at = True, None
        self._send_missed(member)
        return self._advance(now)

    def link_down(self, member: int, now: float) -> list[Effect]:
        """Report that this member's own stream to ``member`` is lost."""
        lost = self._members[member]
        lost.is_linked, lost.report = False, None  # it may have voted since its report
        if lost.lost_at is None:
            lost.lost_at = now
        return self._advance(now)

    def begin(self, member: int, now: float) -> list[Effect]:
        """Report that ``member`` has begun this round: its Hello arrived."""
        self._members[member].has_begun = True
        return self._advance(now)

    def receive(self, member: int, message: Control, now: float) -> list[Effect]:
        """Report a control message of ``member``."""
        self._receive(member, message, now)
        return self._advance(now)

    def add_contribution(self, member: int, index: int, now: float) -> list[Effect]:
        """Report that the whole contribution of ``member`` to a slice arrived.

        Or that ``member`` stated that it makes none.
        """
        self._slices[index].contributed.add(member)
        return self._advance(now)

    def report_progress(self, index: int, now: float) -> None:
        """Report that a part of a slice's result arrived or is being verified.

        The result is then not requested again.
        """
        self._slices[index].progress_at = now

    def hold(self, index: int, result: bytes, now: float) -> list[Effect]:
        """Report that this member has a whole and verified result of a slice, with this hash."""
        part = self._slices[index]
        if result not in part.held:
            part.held += (result,)
            if part.is_reduced and self.decision is None:
                self._effects.extend(SendResult(member, index, result) for member in self._others())
        return self._advance(now)

    def tick(self, now: float) -> list[Effect]:
        """Report that time has passed. Call it once in each heartbeat period."""
        return self._advance(now, tick=True)

    def refute(self, member: int, reason: str, now: float) -> list[Effect]:
        """Report that ``member`` is proven to be dishonest. It takes no part from now on."""
        self._refute(member, reason, is_proven=True)
        return self._advance(now)

    def wants_contribution(self, member: int, index: int, now: float) -> bool:
        """Return whether ``member`` can still use this member's contribution to a slice."""
        until = self._slices[index].sending_until.get(member, now)
        return self.decision is None and not self.finished and now < until

    def reduces(self, index: int) -> bool:
        """Return whether this member still has to reduce the slice, so it needs contributions."""
        return self._slices[index].reduces

    def accepts_result(self, member: int, index: int, result: bytes) -> bool:
        """Return whether to receive a result from ``member``.

        It must not be held yet. It must be the chosen result or come from the slice's reducer.
        """
        part = self._slices[index]
        if result in part.held or self._members[member].is_refuted:
            return False
        if self.decision is not None:
            return bool(self.decision) and result == self.decision[index]
        if result in [wanted for _, wanted in self._wanted(index)]:
            return len(part.held) < MAX_HELD
        return member == part.assignment.reducer and len(part.held) < CANDIDATES

    def _advance(self, now: float, *, tick: bool = False) -> list[Effect]:
        """Take all actions that the state requires. Returns the effects since the last call.

        Idempotent.
        """
        if not self.finished:
            if self.decision is None:
                self._advance_vote(now, tick=tick)
            self._fetch(now)
            self._conclude(now)
        effects, self._effects = self._effects, []
        return effects

    def _advance_vote(self, now: float, *, tick: bool) -> None:
        for index, part in enumerate(self._slices):
            until = self._began + self._timing.contribution_s
            self._send_contribution(part.first_reducer, index, until, now)
        self._reduce(now)
        self._elect(now)
        if self._coordinator == self._me:
            self._coordinate(now, tick=tick)
        elif tick or all(part.held for part in self._slices):
            self._report()
        self._cast(now)

    def _others(self) -> list[int]:
        return [number for number, member in enumerate(self._members) if member.is_linked]

    def _reports(self) -> dict[int, Report]:
        """Return the reports of the members that take this member for the coordinator."""
        reports = ((number, member.report) for number, member in enumerate(self._members))
        return {number: report for number, report in reports if report is not None}

    def _send(self, member: int, message: Control) -> None:
        if isinstance(message, Decided):
            message = self._votes.signed(message)
        self._effects.append(Send(member, message))

    def _broadcast(self, message: Control) -> None:
        for member in self._others():
            self._send(member, message)

    def _send_missed(self, member: int) -> None:
        """Send the messages that a member may have missed before its link came up."""
        if self.finished:
            return
        for part in self._slices:
            part.sending_until.pop(member, None)
        if self._votes.decided is not None:
            self._send(member, self._votes.decided)
        else:
            self._send_missed_of_attempt(member)
        for index, part in enumerate(self._slices):
            if part.assignment.reducer == self._me:
                self._effects.extend(SendResult(member, index, result) for result in part.held)
                if part.is_taken_over and part.reduces:
                    self._send(member, RequestContribution(index))

    def _send_missed_of_attempt(self, member: int) -> None:
        if self._attempt or self._coordinator == self._me:
            self._send(member, Prepare(self._attempt))
        if self._coordinator == self._me:
            if self._announced:
                self._send(member, SlicePlan(self._announced))
            if self._proposed is not None:
                self._send(member, self._proposed)
        elif self._coordinator == member:
            self._report(again=True)

    def _receive(self, member: int, message: Control, now: float) -> None:
        if self._members[member].is_refuted:
            return
        decided, coordinates = self._votes.decided, self._coordinator == member
        match message:
            case Vote() | Decided() | Accusation():
                self._receive_vote(member, message)
            case RequestResult(index, result):
                if result in self._slices[index].held:
                    self._effects.append(SendResult(member, index, result))
            case RequestContribution(index):
                self._slices[index].sending_until.pop(member, None)
                self._send_contribution(member, index, now + self._timing.contribution_s, now)
            case _ if decided is not None:
                self._send(member, decided)
            case Report():
                if self._members[member].report is None and self._announced:
                    self._send(member, SlicePlan(self._announced))
                self._members[member].report = message
                if message.vote is not None:
                    self._receive_vote(member, message.vote)
                elif self._coordinator == self._me and self._proposed is not None:
                    self._send(member, self._proposed)
            case Prepare(attempt):
                self._members[member].attempt = attempt
                if coordinates:
                    self._report(again=True)
            case SlicePlan(assignments) if coordinates:
                self._adopt(assignments, now)
            case Proposal(hashes) if coordinates:
                self._proposed = message
                if self._votes.own is not None and self._votes.own.hashes == hashes:
                    self._send(member, self._votes.own)
                elif self._votes.own is not None:
                    self._report(again=True)

    def _receive_vote(self, member: int, message: Vote | Decided | Accusation) -> None:
        """Accept nothing more from members that ``message`` shows to be dishonest.

        Sends the proofs to the others.
        """
        was_decided = self._votes.decided is not None
        for fault in self._votes.receive(member, message):
            self._refute(fault.member, fault.reason, is_proven=fault.proof is not None)
            if fault.proof is not None:
                self._broadcast(fault.proof)
        if self._votes.decided is not None and not was_decided:
            for reporting in self._reports():
                self._send(reporting, self._votes.decided)

    def _refute(self, member: int, reason: str, *, is_proven: bool) -> None:
        refuted = self._members[member]
        if not refuted.is_refuted or is_proven:
            refuted.is_refuted, refuted.report = True, None
            self._effects.append(Refute(member, reason, is_proven))

    # ---- the vote -------------------------------------------------------------------------------

    def _elect(self, now: float) -> None:
        """Go to the first attempt with a usable coordinator.

        Such a coordinator takes part, and a majority of members has not passed over it.
        """
        blocking = len(self._order) - self._majority + 1
        others = sorted((each.attempt for each in self._members if each.attempt is not None), reverse=True)
        passed_over = others[blocking - 1] if len(others) >= blocking else 0
        attempt = max(self._turn(now), passed_over)
        while not self._takes_part(self._order[attempt % len(self._order)], now):
            attempt += 1
        before, self._attempt = (self._attempt, self._coordinator), attempt
        if before[0] == attempt:
            return
        if before[1] != self._coordinator:
            self._proposed, self._reported, self._announced = None, None, ()
        self._broadcast(Prepare(attempt))

    def _turn(self, now: float) -> int:
        """Return the lowest attempt that time still allows. It rises after ``majority_s``."""
        late_s = now - self._began - self._timing.majority_s
        return max(0, int(late_s / self._timing.attempt_s))

    def _is_late(self, now: float) -> bool:
        return now >= self._began + self._timing.majority_s

    def _takes_part(self, member: int, now: float) -> bool:
        """Return whether a member is reachable, and has begun this round or may still begin it."""
        state = self._members[member]
        begun = state.has_begun or now < self._began + self._timing.contribution_s
        return member == self._me or (begun and not state.is_gone)

    def _present(self, now: float) -> list[int]:
        return [member for member in range(len(self._members)) if self._takes_part(member, now)]

    def _cast(self, now: float) -> None:
        """Vote for the coordinator's proposal, once.

        Votes to commit what this member holds, or to discard when it is time. If this member holds
        all results, the first coordinator alone cannot have the round discarded.
        """
        if self._proposed is None or self._votes.own is not None:
            return
        hashes = self._proposed.hashes
        if hashes:
            ready = self._holds(hashes)
        else:
            is_complete = all(part.held for part in self._slices)
            ready = self._is_late(now) and not (is_complete and self._turn(now) == 0)
        if not ready:
            return
        vote = self._votes.cast(hashes)
        self._reported = self._own_report()  # the coordinator concludes it from the vote
        if self._coordinator != self._me:
            self._send(self._coordinator, vote)

    def _own_report(self) -> Report:
        return Report(tuple(part.held[-CANDIDATES:] for part in self._slices), self._votes.own)

    def _holds(self, hashes: Hashes) -> bool:
        return all(result in part.held for result, part in zip(hashes, self._slices, strict=True))

    def _report(self, *, again: bool = False) -> None:
        report = self._own_report()
        if self._members[self._coordinator].is_linked and (again or report != self._reported):
            self._reported = report
            self._send(self._coordinator, report)

    # ---- slices ---------------------------------------------------------------------------------

    def _send_contribution(self, member: int, index: int, until: float, now: float) -> None:
        part = self._slices[index]
        if member == self._me:
            part.contributed.add(member)
        elif self._members[member].is_linked and member not in part.sending_until and now < until:
            part.sending_until[member] = until
            self._effects.append(SendContribution(member, index))

    def _adopt(self, assignments: tuple[Assignment, ...], now: float) -> None:
        """Adopt a plan. A new reducer of a slice requests the contributions to it."""
        left_s = self._began + self._timing.majority_s - now
        for index, part in enumerate(self._slices):
            if part.adopt(assignments[index], self._timing, now, left_s):
                self._broadcast(RequestContribution(index))

    def _reduce(self, now: float) -> None:
        present = {*self._present(now)}
        for index, part in enumerate(self._slices):
            if part.reduces and (present <= part.contributed or now >= part.due):
                part.is_reduced = True
                self._effects.append(Reduce(index, tuple(sorted(part.contributed))))

    def _fetch(self, now: float) -> None:
        """Request chosen results that are missing and are not being sent."""
        if self.decision == DISCARD:
            return
        for index, part in enumerate(self._slices):
            wanted = self._wanted(index)
            if not wanted or any(result in part.held for _, result in wanted):
                continue
            expected = self.decision is None and not self._members[part.assignment.reducer].is_gone
            if expected and part.progress_at == -math.inf:
                part.progress_at = now
            others = self._others()
            if not others or now - part.progress_at < self._timing.streams.silence_s:
                continue
            holder, result = wanted[part.requests % len(wanted)]
            if len(wanted) == 1 and (part.requests or holder not in others):
                holder = others[part.requests % len(others)]
            part.requests += 1
            part.progress_at = now
            if holder in others:
                self._send(holder, RequestResult(index, result))

    def _wanted(self, index: int) -> list[tuple[int, bytes]]:
        """Return the (holder, hash) of the results that would do for this member.

        That is the result to commit. Before there is one, the coordinator needs any of the results
        that members reported to it.
        """
        assignment = self._slices[index].assignment
        proposed = None if self._proposed is None else self._proposed.hashes
        if hashes := self.decision or proposed:
            return [(assignment.holder, hashes[index])]
        if assignment.chosen:
            return [(assignment.holder, assignment.chosen)]
        if self._coordinator != self._me:
            return []
        is_live = not self._members[assignment.reducer].is_gone
        return claims(self._reports(), index, assignment.reducer, reducer_is_live=is_live)

    # ---- as coordinator -------------------------------------------------------------------------

    def _coordinate(self, now: float, *, tick: bool) -> None:
        reports = self._reports() | {self._me: self._own_report()}
        if len(reports) >= self._majority and self._proposed is None:
            live = self._present(now)
            replaced = [index for index in range(len(self._slices)) if self._must_be_replaced(index, now)]
            likely = self._votes.likely(len(self._members) - len(reports))
            before = [part.assignment for part in self._slices]
            assignments = plan(before, reports, self._me, live, replaced=replaced, likely=likely)
            self._adopt(assignments, now)
            if tick and assignments != self._announced:
                self._announced = assignments
                self._broadcast(SlicePlan(assignments))
            late = self._is_late(now)
            if likely is None:
                hashes = propose(assignments, reports, live, majority=self._majority, majority_suffices=late)
            else:
                hashes = propose_again(likely, reports[self._me], majority_suffices=late)
            if hashes is not None:
                self._proposed = Proposal(hashes)
                self._broadcast(self._proposed)
        self._cast(now)
        if decided := self._votes.tally():
            self._votes.decided = decided
            self._broadcast(decided)

    def _must_be_replaced(self, index: int, now: float) -> bool:
        """Return whether the reducer of a slice is lost, has not begun the round, or is late."""
        part = self._slices[index]
        reducer = self._members[part.assignment.reducer]
        if reducer.is_refuted:
            return True
        arriving = now - part.progress_at < self._timing.streams.silence_s
        # If a member holds the lost reducer's result, it reports that within two heartbeats.
        if reducer.lost_at is not None:
            tried = part.requests >= len(self._wanted(index)) and not arriving
            return now - reducer.lost_at >= 2 * self._timing.streams.heartbeat_s and tried
        return not self._takes_part(part.assignment.reducer, now) or (now >= part.late_at and not arriving)

    # ---- the end --------------------------------------------------------------------------------

    def _conclude(self, now: float) -> None:
        left = sum(not member.is_gone for member in self._members)
        self._majority_lost_at = min(self._majority_lost_at, now) if left < self._majority else math.inf
        if self.decision == DISCARD:
            empty = [index for index, part in enumerate(self._slices) if not part.held]
            self._finish(DISCARD, f"discarded: no result of slices {empty}" if empty else "discarded")
        elif self.decision and self._holds(self.decision):
            self._finish(self.decision, "committed")
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
