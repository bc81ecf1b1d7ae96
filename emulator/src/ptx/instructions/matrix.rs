//! Matrix instructions of a whole warp. They join a [batch](super::super::batch).

use super::super::body::FunctionBody;
use super::super::error::Result;
use super::super::operand::list;
use super::super::statement::Instruction;
use super::super::types::PtxType;

/// Whether an instruction joins a batch; its function then writes no C itself.
pub(in super::super) fn is_matrix(opcode: &str) -> bool {
    matches!(opcode, "mma" | "ldmatrix" | "stmatrix" | "movmatrix")
}

/// `mma` with float32 sums.
pub(super) fn mma(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    if !(i.has("sync") && i.has("aligned") && i.has("row") && i.has("col")) {
        return Err(i.not_emulated());
    }
    let shape = i.which(&["m16n8k16", "m16n8k8", "m16n8k4"])?;
    let [PtxType::F32, element, other, PtxType::F32] = i.types()[..] else { return Err(i.not_emulated()) };
    // How many registers of d, a, b and c a lane holds.
    let registers = match (shape, element) {
        ("m16n8k16", PtxType::Bf16 | PtxType::F16) | ("m16n8k8", PtxType::Tf32) => [4, 4, 2, 4],
        ("m16n8k8", PtxType::Bf16 | PtxType::F16) | ("m16n8k4", PtxType::Tf32) => [4, 2, 1, 4],
        _ => return Err(i.not_emulated()),
    };
    let operands = (0..4).map(|n| Ok(list(i.operand(n)?))).collect::<Result<Vec<_>>>()?;
    if element != other || operands.iter().map(Vec::len).ne(registers) {
        return Err(i.not_emulated());
    }
    let mut sources = Vec::new();
    for source in operands[1..].iter().flatten() {
        sources.push(body.batch_operand(source)?);
    }
    let results = operands[0].iter().map(|register| body.batch_result(register)).collect::<Result<Vec<_>>>()?;
    let words = [results, sources].concat();
    body.batch_call(i.line, &format!("mma_{shape}_{}(lanes,", element.name()), &words);
    Ok(String::new())
}

/// Checks `ldmatrix` or `stmatrix`, and gives the call that does it but its last argument.
fn rows(i: &Instruction<'_>, registers: &[String]) -> Result<String> {
    let count = match i.which(&["x1", "x2", "x4"])? {
        "x1" => 1,
        "x2" => 2,
        _ => 4,
    };
    i.ignore(&["shared", "shared::cta"]);
    if !(i.has("sync") && i.has("aligned") && i.has("m8n8")) || i.ty()? != PtxType::Bits(16) || registers.len() != count
    {
        return Err(i.not_emulated());
    }
    Ok(format!("{}(lanes, {}, {count}, {},", i.opcode, i.line, i.has("trans")))
}

pub(super) fn ldmatrix(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let registers = list(i.operand(0)?);
    let call = rows(i, &registers)?;
    let address = body.address(i.operand(1)?)?;
    let mut words = vec![body.batch_value(&address)];
    for register in &registers {
        words.push(body.batch_result(register)?);
    }
    body.batch_call(i.line, &call, &words);
    Ok(String::new())
}

pub(super) fn stmatrix(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    let registers = list(i.operand(1)?);
    let call = rows(i, &registers)?;
    let address = body.address(i.operand(0)?)?;
    let mut words = vec![body.batch_value(&address)];
    for register in &registers {
        words.push(body.batch_operand(register)?);
    }
    body.batch_call(i.line, &call, &words);
    Ok(String::new())
}

pub(super) fn movmatrix(body: &mut FunctionBody<'_, '_>, i: &Instruction<'_>) -> Result<String> {
    if !(i.has("sync") && i.has("aligned") && i.has("m8n8") && i.has("trans")) || i.ty()? != PtxType::Bits(16) {
        return Err(i.not_emulated());
    }
    let source = body.batch_operand(i.operand(1)?)?;
    let result = body.batch_result(i.operand(0)?)?;
    body.batch_call(i.line, "movmatrix(lanes,", &[result, source]);
    Ok(String::new())
}
