"""Every estimator of what is not read, by name. A new one is a file here and a row in `core/registry.py`."""

from __future__ import annotations

from collections.abc import Mapping

from sparsekv.core.estimators.base import Estimator
from sparsekv.core.estimators.centroid import CentroidEstimator
from sparsekv.core.estimators.phi import PhiEstimator
from sparsekv.core.estimators.uniform import UniformEstimator
from sparsekv.core.registry import ESTIMATOR_ROWS, Classes

ESTIMATORS: Mapping[str, type[Estimator]] = Classes(ESTIMATOR_ROWS)

__all__ = ["ESTIMATORS", "CentroidEstimator", "Estimator", "PhiEstimator", "UniformEstimator"]
