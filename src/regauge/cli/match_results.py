"""What `regauge match` and `regauge compare` tell: results, and the same as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.cli.pair import Pair
    from regauge.matching import Match
    from regauge.matching.compare import Comparison
    from regauge.matching.refine import Refinement
    from regauge.results.findings import Results, Table


def results_of_match(
    pair: Pair,
    found: Match,
    facts: dict[str, Any],
    *,
    by_weights: bool = True,
    refined: Refinement | None = None,
) -> Results:
    """Return the results of a match.

    Args:
        pair: the two models.
        found: the match.
        facts: the facts of the run.
        by_weights: the distance of the weights is what was minimized. Otherwise it is reported
        without a verdict: a match by
            activations, or one that was refined, may end at a larger distance.
        refined: the refinement, whose divergence gets the verdict.
    """
    from regauge.results.findings import Figure, Finding, Results

    distance = Finding(
        "match/distance",
        "the moved model is nearer than the model as it stands",
        found.distance <= found.distance_before if by_weights and refined is None else None,
        found.distance,
        0.0,
        found.distance_before,
        f"distance {found.distance_before:.4g} as they stand, {found.distance:.4g} after "
        f"matching ({found.relative_distance:.1%} of B's norm)",
        measure="Euclidean distance",
    )
    findings = [distance]
    if refined is not None:
        sentence = (
            f"divergence of mixed models from the ends {refined.initial_loss:.4g} before "
            f"refinement, {refined.loss:.4g} after it"
        )
        statement = "refinement does not raise the divergence from the ends on held-out data"
        measure = "divergence in nats"
        held = refined.loss <= refined.initial_loss
        findings.append(
            Finding(
                "match/divergence",
                statement,
                held,
                refined.loss,
                0.0,
                refined.initial_loss,
                sentence,
                measure=measure,
            )
        )
    steps = [s.name for s in found.steps]
    search = Figure(
        "The search",
        "lines",
        {
            "x": list(range(len(steps))),
            "y": {"distance": [s.squared**0.5 for s in found.steps]},
            "xlabel": "0: first pass; then sweeps",
            "ylabel": "distance",
        },
    )
    return Results(
        f"{pair.a.checkpoint.path.name} next to {pair.b.checkpoint.path.name}",
        tuple(findings),
        (modules_table(found), steps_table(found)),
        (search,) if len(steps) > 1 else (),
        {
            **facts,
            "family": pair.spec.family,
            "order": list(found.order),
            "seconds": round(found.seconds, 2),
        },
        tuple(found.notes),
    )


def modules_table(found: Match) -> Table:
    from regauge.results.findings import Table

    rows = tuple((module, before, after) for module, (before, after) in found.by_module().items())
    return Table(
        "Distance by module",
        ("module", "before", "after"),
        (*rows, ("all", found.distance_before, found.distance)),
    )


def steps_table(found: Match) -> Table:
    from regauge.results.findings import Table

    rows, last = [], found.distance_before
    for step in found.steps:
        now = step.squared**0.5
        rows.append((step.name, now, last - now, round(step.seconds, 2)))
        last = now
    return Table("Gains by step", ("step", "distance", "gain", "seconds"), tuple(rows))


def format_match(found: Match, results: Results) -> str:
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    rows = [("step", "distance", "gain", "seconds")]
    rows += [tuple(format_number(c) for c in row) for row in results.tables[1].rows]  # type: ignore[misc]
    lines = [
        results.title,
        "",
        format_columns(rows, right=(1, 2, 3)),
        "",
        *(f.sentence for f in results.findings),
    ]
    return "\n".join([*lines, *(f"note: {n}" for n in found.notes)])


def results_of_comparison(pair: Pair, found: Comparison, facts: dict[str, Any]) -> Results:
    from regauge.results.findings import Figure, Finding, Results, Table

    stand, moved, chance = found.cosines
    findings = (
        Finding(
            "basis/as they stand",
            "the two share a basis as they stand",
            None,
            stand,
            chance,
            1.0,
            found.explanation,
            measure="cosine of the matrices",
        ),
        Finding(
            "basis/matched",
            "the two share a basis after a match",
            None,
            moved,
            chance,
            1.0,
            f"cosine {moved:.3f} after matching; what matching makes of shuffled weights is "
            f"{chance:.3f}",
            measure="cosine of the matrices",
        ),
        Finding(
            "basis/invariant",
            "what no description changes",
            None,
            found.relative_invariant_distance,
            0.0,
            None,
            "invariants (spectra, products of heads, sorted gains) differ by "
            f"{found.relative_invariant_distance:.2%} of B's",
            measure="relative distance",
        ),
    )
    by_layer = Table(
        "By layer",
        ("layer", "cosine", "cosine, matched", "distance", "distance, matched"),
        tuple((label, *values) for label, values in found.layers.items()),
    )
    still = Table(
        "What stays in its place",
        ("space", "share"),
        tuple(found.fixed_shares.items()),
        "Of a permutation its fixed places; of a matrix the mean diagonal.",
    )
    figure = Figure(
        "Cosine by layer",
        "bars",
        {
            "labels": list(found.layers),
            "y": {
                "as they stand": [v[0] for v in found.layers.values()],
                "matched": [v[1] for v in found.layers.values()],
            },
            "ylabel": "cosine",
        },
    )
    verdict = {
        "verdict": found.verdict,
        "in words": found.explanation,
        "family": pair.spec.family,
        "seconds of matching": round(found.match.seconds, 2),
    }
    title = f"{pair.a.checkpoint.path.name} and {pair.b.checkpoint.path.name}: {found.verdict}"
    return Results(
        title,
        findings,
        (by_layer, still, modules_table(found.match)),
        (figure,),
        {**facts, **verdict},
        tuple(found.match.notes),
    )


def format_comparison(found: Comparison, results: Results) -> str:
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    table = results.tables[0]
    rows = [table.columns, *(tuple(format_number(c) for c in row) for row in table.rows)]
    stand, moved, chance = found.cosines
    lines = [results.title, "", format_columns(rows, right=(1, 2, 3, 4)), ""]
    lines += [
        (
            f"cosine of the matrices: {stand:.4f} as they stand, {moved:.4f} matched, {chance:.4f} "
            "by chance"
        )
    ]
    lines += [
        f"what no description changes differs by {found.relative_invariant_distance:.2%}",
        "",
        found.explanation,
    ]
    return "\n".join([*lines, *(f"note: {n}" for n in found.match.notes)])
