"""Finds a rank that always enters its collectives last: it is slow, but does not hang. The result is only a remark,
because the clocks of the hosts may differ, and some rank is always last."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from torchaos.harness.watching.diagnosis.calls import Calls, is_mutual

_NEEDED = 20  # collectives of a group that are needed to judge
_MOSTLY = 0.8  # a slow rank enters at least this part of them last
_SHARE = 0.2  # it is later than the second last rank by this part of the time between two collectives


def remarks(calls: Calls) -> Iterator[str]:
    """Yields a sentence for each group in which one rank is slow (see _MOSTLY and _SHARE)."""
    entered: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for rank, record in calls.ranks.items():
        for call in record.calls:
            if call.done and call.created_s and is_mutual(call.op):
                entered[call.group, call.seq][rank] = call.created_s
    by_group: dict[str, list[dict[int, float]]] = defaultdict(list)
    for (group, _), times in sorted(entered.items()):
        by_group[group].append(times)
    for group, all_times in sorted(by_group.items()):
        members = max(len(times) for times in all_times)
        whole = [times for times in all_times if len(times) == members]
        if members < 3 or len(whole) < _NEEDED:
            continue
        (last, often), *_ = Counter(max(times, key=lambda rank: times[rank]) for times in whole).most_common()
        late = [
            sorted(times.values())[-1] - sorted(times.values())[-2]
            for times in whole
            if max(times, key=times.__getitem__) == last
        ]
        starts = sorted(min(times.values()) for times in whole)
        between = median(after - before for before, after in pairwise(starts))
        if often >= _MOSTLY * len(whole) and median(late) > _SHARE * between:
            yield (
                f"rank {last} is slow: it entered {often} of {len(whole)} collectives of group {group} last, "
                f"by {median(late) * 1e3:.0f} ms (if the clocks of the hosts agree)"
            )
