mod harness;
mod rules;
mod simulation;
