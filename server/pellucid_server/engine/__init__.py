"""The engine process: scheduler, ragged batches, model steps, sampler."""
