mod harness;
mod rules;
mod simulation;
mod speculation;
