"""Looking inside a model offline: what each token looks at, how it is carried on, and what would come next."""

from __future__ import annotations
