mod harness;
mod pushes;
mod sleep;
