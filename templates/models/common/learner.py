class Learner:
    """What a step changes: the network, perhaps a moving average of its weights, the optimiser, and fp16's scaler."""

    def __init__(self, settings: Settings, job: Job) -> None:
        options = settings.train
        self.settings, self.job = settings, job
        self.network = build_model(settings.model).to(job.device)
        self.model = wrap(self.network, options.compile)  # DDP around `network`: the same parameters
        self.ema = make_ema(self.network, options.ema)
        self.optimizer = build_optimizer(self.network, options)
        self.rates = highest_rates(self.optimizer)
        self.scaler = loss_scaler(options, job.device)
        self.skipped = torch.zeros((), device=job.device)  # steps of this start without an update: a NaN
        self.nonfinite_losses = torch.zeros((), device=job.device)  # of this rank: they tell where a NaN comes from

    @property
    def eval_network(self) -> nn.Module:
        """What is evaluated and drawn: the averaged weights if there are any, without DDP, so it never communicates."""
        return self.ema.module if self.ema else self.network

    def checkpoint_objects(self) -> dict[str, checkpoint.Stateful]:
        """What a checkpoint holds: name in the file -> object."""
        objects: dict[str, checkpoint.Stateful] = {"model": self.network, "optimizer": self.optimizer}
        objects |= {"average": self.ema} if self.ema else {}
        objects |= {"scaler": self.scaler} if self.scaler.is_enabled() else {}
        return objects

    def train_step(self, step: int, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Accumulate gradients over `batches`, and take one optimiser step. Returns scalars to log."""
        options, job = self.settings.train, self.job
        set_learning_rate(self.optimizer, self.rates, self.settings, step)
        loss_and_terms = torch.zeros(2, device=job.device)
        for number, batch in enumerate(batches, 1):
            is_last = number == options.accumulate
            with nullcontext() if is_last else self.model.no_sync():  # gradients are reduced once a step
                loss_and_terms += self.forward_backward(batch)
        self.nonfinite_losses += ~loss_and_terms[0].isfinite()
        loss, norm, skipped = update_weights(
            self.network, self.optimizer, self.scaler, loss_and_terms, job, options.clip_norm
        )
        with phase("optim"):
            self.skipped += skipped
            self.scaler.update()
            if self.ema:
                self.ema.update_parameters(self.network)
        return {"loss": loss, "grad_norm": norm, "nonfinite_steps": self.skipped}

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate gradients. Returns: the loss summed over the batch, and the number of its terms, float32 [2]."""
        batch = to_device(batch, self.job.device)
        with phase("forward"), autocast(self.settings.train, self.job.device):
            loss, terms = training_loss(self.model, batch)
        with phase("backward"):  # DDP averages the gradients over the ranks meanwhile
            self.scaler.scale(loss).backward()
        return torch.stack([loss.detach().float(), terms.float()])

    def rehearse(self, largest: Batch) -> None:
        """Run forward and backward of the largest batch, and compare the ranks: see ddp/rehearsal.py."""
        rehearse(self.job, [self.model], lambda: self.forward_backward(largest))


def build_optimizer(network: nn.Module, options: TrainSettings) -> torch.optim.Optimizer:
    """Return the optimiser of all parameters of `network`; tests/test_parity.py trains with the same one."""
    return torch.optim.AdamW(
        network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, fused=True
    )

