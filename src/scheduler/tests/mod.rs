mod flood;
mod harness;
mod quotas;
mod rules;
mod shared_prompts;
mod simulation;
mod speculation;
mod tenants;
