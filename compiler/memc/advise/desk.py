"""The desk: variations of one spec, priced with what earlier ones computed."""

from __future__ import annotations

from memc.advise.attempt import Attempt, Shortfall, Stopper
from memc.errors import Diagnostic, MemcError
from memc.facts import GpuFacts, ModelFacts
from memc.facts.calibration import planned
from memc.ledger import Estimator, ledger_facts
from memc.ledger.constants import LedgerFacts
from memc.solver.kept import Kept
from memc.solver.resolve import resolve
from memc.solver.solve import choose, machine_of
from memc.spec import LoadedSpec, Spec
from memc.spec_checks import contradictions


class Desk:
    """Tries variations of a spec.

    Parts of the ledger are kept by model and by library facts, so that cards of one generation share them.
    """

    def __init__(self, loaded: LoadedSpec, model: ModelFacts, gpu: GpuFacts, samples: int | None) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        self.model = model
        self.gpu = gpu
        self.samples = samples
        self._kept = Kept()
        self._estimators: dict[tuple[str, str, LedgerFacts], Estimator] = {}

    def card(self, facts: GpuFacts) -> GpuFacts:
        """Returns a card of the catalogue as plans use it: with what the user measured; the spec's own as it is."""
        return self.gpu if facts.key == self.gpu.key else planned(facts)

    def attempt(self, spec: Spec, *, model: ModelFacts | None = None, gpu: GpuFacts | None = None) -> Attempt:
        """Returns what becomes of a variation.

        Args:
            spec: The variation.
            model: Facts of its model; those of the spec when not given.
            gpu: Facts of its card; those of the spec when not given.

        Raises:
            MemcError: When the variation contradicts itself or the facts, or a fact that memory needs is unknown.
        """
        found = contradictions(spec)
        if found:
            raise MemcError(
                tuple(self.loaded.diagnostic(item.field, item.code, item.message, item.hint) for item in found)
            )
        # The document keeps the places of the text; fields that the variation changes are located where they stood.
        loaded = LoadedSpec(spec=spec, path=self.loaded.path, text=self.loaded.text, document=self.loaded.document)
        model, gpu = model or self.model, gpu or self.gpu
        facts = ledger_facts(gpu)
        question = resolve(loaded, model, gpu, facts, self.samples)
        machine = machine_of(question, self._estimator(model, facts), self._kept)
        return Attempt(machine=machine, best=choose(machine))

    def attempt_or_why_not(
        self, spec: Spec, *, model: ModelFacts | None = None, gpu: GpuFacts | None = None
    ) -> Attempt | Shortfall:
        """Returns what becomes of a variation, or why it makes no sense."""
        try:
            return self.attempt(spec, model=model, gpu=gpu)
        except MemcError as error:
            return refused(error.diagnostics[0])

    def _estimator(self, model: ModelFacts, facts: LedgerFacts) -> Estimator:
        key = (model.key, model.source, facts)
        if key not in self._estimators:
            self._estimators[key] = Estimator(model, facts)
        return self._estimators[key]


def refused(diagnostic: Diagnostic) -> Shortfall:
    """Returns a diagnostic as what stops a variation."""
    return Shortfall(stopped_by=Stopper.REFUSED, sentence=diagnostic.message)
