"""General findings about networks, beside those on a model."""

from __future__ import annotations

from dataclasses import replace

import torch

from regauge.results.findings import Results
from regauge.verification.operators import check_operators as operator_findings
from regauge.verification.optimizers import optimizer_matrix


def add_general_findings(
    results: Results,
    dtype: torch.dtype,
    seed: int,
    *,
    operators: bool = True,
    optimizers: bool = False,
) -> Results:
    """Return the results with Theorem 4.7 by operator and, on request, the optimizer matrix."""
    if operators:
        results = replace(results, findings=(*results.findings, *operator_findings(dtype, seed)))
    if not optimizers:
        return replace(
            results,
            unchecked=(*results.unchecked, "which optimizers keep which symmetry (--optimizers)"),
        )
    findings, table, figure = optimizer_matrix(seed)
    return replace(
        results,
        findings=(*results.findings, *findings),
        tables=(*results.tables, table),
        figures=(*results.figures, figure),
    )
