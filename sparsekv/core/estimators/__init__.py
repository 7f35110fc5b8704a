"""Every estimator of what is not read, by name. A new one is a file here and a line below."""

from sparsekv.core.estimators.base import Estimator
from sparsekv.core.estimators.centroid import CentroidEstimator
from sparsekv.core.estimators.phi import PhiEstimator

ESTIMATORS: dict[str, type[Estimator]] = {"phi": PhiEstimator, "centroid": CentroidEstimator}

__all__ = ["ESTIMATORS", "CentroidEstimator", "Estimator", "PhiEstimator"]
