"""What the coordinator of an attempt decides from what members report. Pure functions."""

from collections.abc import Mapping, Sequence

from swarmnet_protocols.training.rounds.messages import DISCARD, Hashes, Report, Slot

Reports = Mapping[int, Report]
"""Of one attempt, by member, the coordinator's own among them."""


def plan(
    slots: Sequence[Slot], reports: Reports, live: Sequence[int], replaced: Sequence[int]
) -> tuple[Slot, ...]:
    """Slots for all slices: a result that some live member holds rather than another reduction, another owner for slices ``replaced``.

    What was chosen stays chosen while a live member holds it. The new owner is the live one that owns least.
    """
    reporting = [member for member in live if member in reports]
    planned = list(slots)
    for index, slot in enumerate(slots):
        holders = [member for member in reporting if reports[member].held[index]]
        if holders:
            planned[index] = _slot_with_result(index, slot, {member: reports[member] for member in holders})
        elif index in replaced:
            load = [each.owner for each in planned]
            candidates = [member for member in reporting if member != slot.owner] or [slot.owner]
            planned[index] = Slot(min(candidates, key=lambda member: (load.count(member), member)))
        else:
            planned[index] = Slot(slot.owner)
    return tuple(planned)


def _slot_with_result(index: int, slot: Slot, holding: Reports) -> Slot:
    first = slot.owner if slot.owner in holding else min(holding)
    if any(slot.chosen in report.held[index] for report in holding.values()):
        chosen = slot.chosen
    else:
        chosen = holding[first].held[index][0]
    holders = [member for member, report in holding.items() if chosen in report.held[index]]
    return Slot(slot.owner, chosen, slot.owner if slot.owner in holders else min(holders))


def propose(
    slots: Sequence[Slot], reports: Reports, live: Sequence[int], *, majority: int, settled: bool
) -> Hashes | None:
    """What an attempt with promises from a majority must, or may, propose now; None: nothing yet.

    What somebody accepted in the latest attempt of all reported must be proposed again. Otherwise COMMIT, when all live members hold
    all results; once ``settled`` a majority of holders is enough, and without one it is DISCARD.
    """
    votes = [report.vote for report in reports.values() if report.vote is not None]
    if votes:
        return max(votes, key=lambda vote: vote.attempt).hashes
    chosen = tuple(slot.chosen for slot in slots)
    complete = [member for member in live if member in reports and _holds_all(reports[member], chosen)]
    if len(complete) >= majority and (settled or complete == list(live)):
        return chosen
    return DISCARD if settled else None


def _holds_all(report: Report, hashes: Hashes) -> bool:
    return all(result in held for result, held in zip(hashes, report.held, strict=True))
