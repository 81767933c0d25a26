"""The plans and the proposal of the coordinator of a round, by the members' reports. Pure.

The coordinator chooses only results that it holds itself. So no member can make the others wait for
a result that does not exist.
"""

from collections.abc import Mapping, Sequence

from swarmnet_protocols.training.rounds.messages import DISCARD, Assignment, Hashes, Report

Reports = Mapping[int, Report]
"""Member → report, including the coordinator's own."""


def plan(
    assignments: Sequence[Assignment],
    reports: Reports,
    me: int,
    live: Sequence[int],
    *,
    replaced: Sequence[int],
    likely: Hashes | None,
) -> tuple[Assignment, ...]:
    """Assign all slices: keep or choose a result, or name a new reducer for slices in ``replaced``.

    If members may have decided an outcome already, it is ``likely``, and its results are chosen.
    Otherwise the coordinator ``me`` chooses a result that it holds; an earlier choice stays if it
    holds that result. The new reducer is the live member with the fewest slices.
    """
    reporting = [member for member in live if member in reports]
    planned = list(assignments)
    for index, assignment in enumerate(assignments):
        mine = reports[me].held[index]
        if likely:
            planned[index] = _with_result(index, assignment, likely[index], reports, reporting, me)
        elif mine:
            chosen = assignment.chosen if assignment.chosen in mine else mine[0]
            planned[index] = _with_result(index, assignment, chosen, reports, reporting, me)
        elif index in replaced:
            load = [each.reducer for each in planned]
            candidates = [member for member in reporting if member != assignment.reducer] or [
                assignment.reducer
            ]
            planned[index] = Assignment(min(candidates, key=lambda member: (load.count(member), member)))
        else:
            planned[index] = Assignment(assignment.reducer)
    return tuple(planned)


def _with_result(
    index: int, assignment: Assignment, chosen: bytes, reports: Reports, reporting: Sequence[int], me: int
) -> Assignment:
    holders = [member for member in reporting if chosen in reports[member].held[index]]
    holder = assignment.reducer if assignment.reducer in holders else min(holders, default=me)
    return Assignment(assignment.reducer, chosen, holder)


def propose(
    assignments: Sequence[Assignment],
    reports: Reports,
    live: Sequence[int],
    *,
    majority: int,
    majority_suffices: bool,
) -> Hashes | None:
    """Return the outcome that a coordinator proposes; None if it is too early.

    Needs reports from a majority. Proposes COMMIT once all live members hold all results. From
    ``majority_s`` on (``majority_suffices``) it is enough that a majority holds all results. If no
    majority does by then, proposes DISCARD.
    """
    chosen = tuple(assignment.chosen for assignment in assignments)
    complete = [member for member in live if member in reports and _holds_all(reports[member], chosen)]
    if len(complete) >= majority and (majority_suffices or complete == list(live)):
        return chosen
    return DISCARD if majority_suffices else None


def propose_again(likely: Hashes, own: Report, *, majority_suffices: bool) -> Hashes | None:
    """Return ``likely``, the outcome that members may have decided, or None.

    None until the coordinator can vote for it itself. So a member that voted for results that
    nobody has cannot make the others wait for them.
    """
    possible = _holds_all(own, likely) if likely else majority_suffices
    return likely if possible else None


def claims(reports: Reports, index: int, reducer: int, *, reducer_is_live: bool) -> list[tuple[int, bytes]]:
    """Return the (member, hash) of a slice's results.

    They come from its reducer, or from all others if the reducer is gone.
    """
    return [
        (member, result)
        for member, report in reports.items()
        for result in report.held[index]
        if (member == reducer) == reducer_is_live
    ]


def _holds_all(report: Report, hashes: Hashes) -> bool:
    return all(result in held for result, held in zip(hashes, report.held, strict=True))
