mod harness;
mod rules;
mod shared_prompts;
mod simulation;
mod speculation;
