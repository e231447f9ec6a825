class Learner:
    """What a step changes: generators, perhaps a moving average of theirs, the discriminator, and the optimisers.

    A step updates the discriminator, then the generators. Each of the three DDP wrappers runs in its own half of the
    step only, one forward and one backward a batch: the other half calls the network inside it.
    """

    def __init__(self, settings: Settings, job: Job) -> None:
        options = settings.train
        self.settings, self.job = settings, job
        self.network, self.discriminator = build_model(settings.model)
        networks = [part.to(job.device) for part in (self.network.coarse, self.network.refiner, self.discriminator)]
        self.g1, self.g2, self.d = (wrap(network, options.compile) for network in networks)  # the same weights, in DDP
        self.ema = make_ema(self.network, options.ema)
        self.optimizer = build_optimizer(self.network, options)
        self.d_optimizer = build_optimizer(self.discriminator, options, settings.model.discriminator_rate)
        self.rates, self.d_rates = highest_rates(self.optimizer), highest_rates(self.d_optimizer)
        self.scaler = loss_scaler(options, job.device)  # one scale for both optimisers
        self.skipped = torch.zeros((), device=job.device)  # steps of this start without an update: a NaN
        self.nonfinite_losses = torch.zeros((), device=job.device)  # of this rank: they tell where a NaN comes from

    @property
    def eval_network(self) -> Generators:
        """What is evaluated and drawn: the averaged weights if there are any, without DDP, so it never communicates."""
        return cast(Generators, self.ema.module) if self.ema else self.network

    def checkpoint_objects(self) -> dict[str, checkpoint.Stateful]:
        """What a checkpoint holds: name in the file -> object."""
        objects: dict[str, checkpoint.Stateful] = {"model": self.network, "optimizer": self.optimizer}
        objects |= {"discriminator": self.discriminator, "discriminator_optimizer": self.d_optimizer}
        objects |= {"average": self.ema} if self.ema else {}
        objects |= {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        return objects

    def train_step(self, step: int, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Accumulate gradients over `batches`, and take one optimiser step. Returns scalars to log."""
        parts = list(batches)  # both halves of the step see the same samples
        set_learning_rate(self.d_optimizer, self.d_rates, self.settings, step)
        d_loss, d_norm, d_skipped = self.update(
            self.discriminator, self.d_optimizer, self.gradients(self.discriminator_loss, parts, self.d)
        )
        set_learning_rate(self.optimizer, self.rates, self.settings, step)
        with frozen(self.discriminator):  # else it would gather gradients here, which nobody reduces
            loss_and_terms = self.gradients(self.generator_loss, parts, self.g1, self.g2)
        loss, norm, skipped = self.update(self.network, self.optimizer, loss_and_terms)
        with phase("optim"):
            self.skipped += torch.maximum(skipped, d_skipped)  # each norm is equal on all ranks, so each decision is
            self.scaler.update()  # after both: one loss must not be scaled by one number and unscaled by another
            if self.ema:
                self.ema.update_parameters(self.network)
        values = {"loss": loss, "grad_norm": norm, "nonfinite_steps": self.skipped}
        return values | {"d_loss": d_loss, "d_grad_norm": d_norm}

    def update(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, loss_and_terms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step with one of the two optimisers: see `update_weights`."""
        return update_weights(network, optimizer, self.scaler, loss_and_terms, self.job, self.settings.train.clip_norm)

    def discriminator_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How badly real and made pictures are told apart; the generators only make them."""
        return discriminator_loss(self.d, self.g1.module, self.g2.module, batch, self.settings.model)

    def generator_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How badly the generators do, also in the eyes of the discriminator, which only judges."""
        return generator_loss(self.d.module, self.g1, self.g2, batch, self.settings.model)

    def gradients(self, loss_of: Loss, parts: Sequence[Batch], *models: DistributedDataParallel) -> Tensor:
        """Forward and backward of all parts through `models`. Returns: loss and terms of this rank, float32 [2]."""
        loss_and_terms = torch.zeros(2, device=self.job.device)
        for number, part in enumerate(parts, 1):
            with ExitStack() as unsynced:
                for model in models if number < len(parts) else ():  # one reduction a step, of each model
                    unsynced.enter_context(model.no_sync())
                loss_and_terms += self.forward_backward(loss_of, part)
        self.nonfinite_losses += ~loss_and_terms[0].isfinite()
        return loss_and_terms

    def forward_backward(self, loss_of: Loss, batch: Batch) -> Tensor:
        """Accumulate gradients. Returns: the loss summed over the batch, and the number of its terms, float32 [2]."""
        batch = to_device(batch, self.job.device)
        with phase("forward"), autocast(self.settings.train, self.job.device):
            loss, terms = loss_of(batch)
        with phase("backward"):  # DDP averages the gradients over the ranks meanwhile
            self.scaler.scale(loss).backward()
        return torch.stack([loss.detach().float(), terms.float()])

    def rehearse(self, largest: Batch) -> None:
        """Run forward and backward of the largest batch, and compare the ranks: see ddp/rehearsal.py."""

        def both() -> Tensor:  # so that every wrapper has gradients to compare
            losses = self.forward_backward(self.discriminator_loss, largest)
            with frozen(self.discriminator):
                return losses + self.forward_backward(self.generator_loss, largest)

        rehearse(self.job, [self.g1, self.g2, self.d], both)


def build_optimizer(network: nn.Module, options: TrainSettings, scale: float = 1.0) -> torch.optim.Optimizer:
    """Return the optimiser of either side, with `scale` times the learning rate; tests/test_parity.py uses the same."""
    lr, decay = scale * options.learning_rate, options.weight_decay
    # A long memory of gradients is of little use against a moving opponent.
    return torch.optim.AdamW(network.parameters(), lr, betas=(0.5, 0.99), weight_decay=decay, fused=True)


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Let gradients pass through `network`, in forward and backward, but make none for its parameters."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)

