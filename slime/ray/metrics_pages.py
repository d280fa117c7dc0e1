"""Which metrics pages the engines and routers of a run have, for that of ``--prometheus-port``."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from slime.observability.metrics_pages import MetricsPage
from slime.ray.engine import EngineState
from slime.ray.served_model import ServedModel


def pages_of(models: Iterable[ServedModel]) -> list[MetricsPage]:
    """The pages of routers, and of engines that have started and not died since."""
    pages = []
    for model in models:
        router = model.router
        if router is not None and router.metrics_url is not None:
            labels = {"model": model.name, "router": urlsplit(router.url).netloc}
            pages.append(MetricsPage(router.metrics_url, labels))
        pages += [
            MetricsPage(f"{engine.url}/metrics", {"model": model.name, "engine": str(engine.rank)})
            for engine in (*model.engines, *model.joiners)
            if engine.has_started and engine.state is not EngineState.DEAD
        ]
    return pages
