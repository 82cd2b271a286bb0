"""Results of a match and of a comparison, and their text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.matching import Match
    from regauge.matching.compare import Comparison
    from regauge.matching.pairs import Pair
    from regauge.matching.refine import Refinement
    from regauge.results.findings import Results, Table

# The headline of a comparison and its tone, by the verdict.
_HEADLINES = {
    "equal": ("The two models are equal", "good"),
    "same basis": ("The two models share a basis: they merge without matching", "good"),
    "same model, transformed": ("One model in two bases: match before merging", "mixed"),
    "related": ("Related models in different bases: match before merging", "mixed"),
    "unrelated": ("The two models do not share a basis: a plain average will not work", "bad"),
}


def results_of_match(
    pair: Pair,
    result: Match,
    facts: dict[str, Any],
    *,
    by_weights: bool = True,
    refined: Refinement | None = None,
) -> Results:
    """Return the results of a match.

    Args:
        pair: the two models.
        result: the match.
        facts: the facts of the run.
        by_weights: whether the distance of the weights was minimized. Otherwise it is reported
            without a verdict: a match by activations, or a refined one, may end at a larger
            distance.
        refined: the refinement, whose divergence gets the verdict.

    No finding fails: the output computes what A computes, however near it comes to B.
    """
    from regauge.results.findings import Claim, Figure, Finding, Results

    is_nearer = result.distance <= result.distance_before
    distance = Finding(
        "match/distance",
        "the aligned model is nearer than the original",
        True if by_weights and refined is None and is_nearer else None,
        result.distance,
        0.0,
        result.distance_before,
        f"distance {result.distance_before:.4g} unmatched, {result.distance:.4g} after "
        f"matching ({result.relative_distance:.1%} of B's norm)",
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
        holds = True if refined.loss <= refined.initial_loss else None
        findings.append(
            Finding(
                "match/divergence",
                statement,
                holds,
                refined.loss,
                0.0,
                refined.initial_loss,
                sentence,
                measure=measure,
            )
        )
    steps = [s.name for s in result.steps]
    search = Figure(
        "The search",
        "lines",
        {
            "x": list(range(len(steps))),
            "y": {"distance": [s.squared**0.5 for s in result.steps]},
            "xlabel": "0: first pass; then sweeps",
            "ylabel": "distance",
        },
    )
    size = sum(result.size.values()) ** 0.5 or 1.0
    claim = Claim(
        "A was rewritten in the basis of B: it computes the same and is nearer to B"
        if is_nearer
        else "A was rewritten in another basis: it computes the same, and is not nearer to B",
        "good" if is_nearer else "mixed",
        f"{result.distance_before / size:.0%} → {result.distance / size:.0%}",
        "distance of the weights from B, of B's norm, before and after matching",
        "A is what was matched, B the model it was matched to. Measure with regauge barrier "
        "whether they can be averaged.",
    )
    return Results(
        f"{pair.a.checkpoint.path.name} aligned with {pair.b.checkpoint.path.name}",
        tuple(findings),
        (modules_table(result), steps_table(result)),
        (search,) if len(steps) > 1 else (),
        {
            **facts,
            "family": pair.spec.family,
            "order": list(result.order),
            "seconds": round(result.seconds, 2),
        },
        tuple(result.notes),
        claim,
    )


def modules_table(result: Match) -> Table:
    """Return the table of distances by module."""
    from regauge.results.findings import Table

    rows = tuple((module, before, after) for module, (before, after) in result.by_module().items())
    return Table(
        "Distance by module",
        ("module", "before", "after"),
        (*rows, ("all", result.distance_before, result.distance)),
    )


def steps_table(result: Match) -> Table:
    """Return the table of the search, step by step."""
    from regauge.results.findings import Table

    rows, previous = [], result.distance_before
    for step in result.steps:
        current = step.squared**0.5
        rows.append((step.name, current, previous - current, round(step.seconds, 2)))
        previous = current
    return Table("Gains by step", ("step", "distance", "gain", "seconds"), tuple(rows))


def format_match(result: Match, results: Results) -> str:
    """Format a match for a terminal."""
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    rows = [["step", "distance", "gain", "seconds"]]
    rows += [[format_number(c) for c in row] for row in results.tables[1].rows]
    lines = [
        results.title,
        "",
        format_columns(rows, right=(1, 2, 3)),
        "",
        *(f.sentence for f in results.findings),
    ]
    return "\n".join([*lines, *(f"note: {n}" for n in result.notes)])


def results_of_comparison(pair: Pair, comparison: Comparison, facts: dict[str, Any]) -> Results:
    """Return the results of a comparison."""
    from regauge.results.findings import Claim, Figure, Finding, Results, Table

    unmatched, matched, chance = comparison.cosines
    findings: tuple[Finding, ...] = (
        Finding(
            "basis/unmatched",
            "the two share a basis unmatched",
            None,
            unmatched,
            0.0 if chance is None else chance,
            1.0,
            comparison.explanation,
            measure="cosine of the matrices",
        ),
    )
    if matched is not None and chance is not None:
        findings += (
            Finding(
                "basis/matched",
                "the two share a basis after a match",
                None,
                matched,
                chance,
                1.0,
                f"cosine {matched:.3f} after matching; the control, shuffled weights, reaches "
                f"{chance:.3f}",
                measure="cosine of the matrices",
            ),
        )
    if comparison.relative_invariant_distance is not None:
        findings += (
            Finding(
                "basis/invariant",
                "invariants under every symmetry",
                None,
                comparison.relative_invariant_distance,
                0.0,
                None,
                "invariants (spectra, products of heads, sorted gains) differ by "
                f"{comparison.relative_invariant_distance:.2%} of B's",
                measure="relative distance",
            ),
        )
    by_layer = Table(
        "By layer",
        ("layer", "cosine", "cosine, matched", "distance", "distance, matched"),
        tuple((label, *values) for label, values in comparison.layers.items()),
    )
    fixed = Table(
        "Fixed share",
        ("space", "share"),
        tuple(comparison.fixed_shares.items()),
        "Of a permutation the share of fixed points; of a matrix the mean diagonal.",
    )
    cosines = {"unmatched": [v[0] for v in comparison.layers.values()]}
    if matched is not None:
        cosines["matched"] = [v[1] or 0.0 for v in comparison.layers.values()]
    figure = Figure(
        "Cosine by layer",
        "bars",
        {"labels": list(comparison.layers), "y": cosines, "ylabel": "cosine of the weights"},
        "1: the weights of the layer are equal, up to a factor.",
    )
    headline, tone = _HEADLINES.get(comparison.verdict, (comparison.verdict, "none"))
    has_match = matched is not None and chance is not None
    claim = Claim(
        headline,
        tone,
        f"{unmatched:.2f} → {matched:.2f}" if has_match else f"{unmatched:.2f}",
        f"cosine of the weights before and after matching (1: equal; by chance {chance:.2f})"
        if has_match
        else "cosine of the weights (1: equal)",
        comparison.explanation,
    )
    verdict = {
        "verdict": comparison.verdict,
        "in words": comparison.explanation,
        "family": pair.spec.family,
        "seconds of matching": round(comparison.match.seconds, 2),
    }
    title = f"{pair.a.checkpoint.path.name} and {pair.b.checkpoint.path.name}: {comparison.verdict}"
    return Results(
        title,
        findings,
        (by_layer, fixed, modules_table(comparison.match)),
        (figure,),
        {**facts, **verdict},
        tuple(comparison.match.notes),
        claim,
    )


def format_comparison(comparison: Comparison, results: Results) -> str:
    """Format a comparison for a terminal."""
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    table = results.tables[0]
    kept = [i for i, c in enumerate(table.columns) if any(row[i] is not None for row in table.rows)]
    rows = [
        tuple(table.columns[i] for i in kept),
        *(tuple(format_number(row[i]) for i in kept) for row in table.rows),
    ]
    unmatched, matched, chance = comparison.cosines
    lines = [results.title, "", format_columns(rows, right=range(1, len(kept))), ""]
    if matched is None:
        lines.append(f"cosine of the matrices: {unmatched:.4f} unmatched")
    else:
        lines += [
            (
                f"cosine of the matrices: {unmatched:.4f} unmatched, {matched:.4f} matched, "
                f"{chance:.4f} by chance"
            ),
            f"invariants differ by {comparison.relative_invariant_distance:.2%}",
        ]
    lines += ["", comparison.explanation]
    return "\n".join([*lines, *(f"note: {n}" for n in comparison.match.notes)])
