use super::*;

const CONFIG: &str = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}"#;

/// An adapter of rank 2 of the query projections of both layers, with random float32 factors.
fn adapter(rng: &mut StdRng) -> Vec<Sent> {
    let mut push = Vec::new();
    for layer in 0..2 {
        for (factor, shape) in [("A", [2, HIDDEN]), ("B", [8, 2])] {
            let name = format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight");
            push.push(Sent::new(&name, Dtype::F32, &shape, random_bytes(rng, Dtype::F32, shape.iter().product())));
        }
    }
    push.shuffle(rng);
    push
}

fn with_config() -> UpdateHeader {
    UpdateHeader { adapter_config: CONFIG.into(), ..UpdateHeader::new(UpdateKind::Lora) }
}

/// Asserts that the adapter has the factors that were sent.
fn check(received: VerifiedPush, push: &[Sent], context: &str) {
    assert_eq!((received.bytes, received.parameters), (total(push), 2), "{context}");
    let WeightUpdate::Lora(adapter) = received.update else { panic!("{context}: not a LORA push") };
    for layer in 0..2 {
        let factors = adapter.factors(&format!("model.layers.{layer}.self_attn.q_proj.weight")).unwrap();
        for (values, factor) in [(factors.a, "A"), (factors.b, "B")] {
            let name = format!("layers.{layer}.self_attn.q_proj.lora_{factor}.weight");
            let sent = push.iter().find(|sent| sent.entry.name.ends_with(&name)).unwrap();
            assert_eq!(values, sent.values(), "{context}: {name}");
        }
    }
}

#[test]
fn an_adapter_is_what_was_sent_whenever_it_was_declared() {
    let parameters = model(false);
    for seed in 0..20 {
        let push = adapter(&mut rng(seed));
        for first in 0..=push.len() {
            let header = UpdateHeader { total_bytes: Some(total(&push)), ..with_config() };
            let declared = declare(header, &push[..first], &parameters, &Sources::default()).unwrap();
            let most = declared.staging().staged;
            let mut receiver = staged(declared);
            receiver.declare(entries(&push[first..])).unwrap();
            assert!(receiver.push.staging().staged <= most, "seed {seed}: {first} declared at once");
            for (i, sent) in push.iter().enumerate() {
                receiver.write(i as u32, 0, &sent.bytes).unwrap();
            }
            check(receiver.finish().unwrap(), &push, &format!("seed {seed}: {first} declared at once"));
        }
    }
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_before_its_bytes() {
    let parameters = model(false);
    let mut push = adapter(&mut rng(1));
    // As many bytes as before, so that the manifest is complete.
    push[2].entry.shape = vec![4, 4];
    assert!(declare(with_config(), &push, &parameters, &Sources::default()).is_err());
    let header = UpdateHeader { total_bytes: Some(total(&push)), ..with_config() };
    let mut receiver = staged(declare(header, &push[..2], &parameters, &Sources::default()).unwrap());
    assert!(receiver.declare(entries(&push[2..])).is_err());
    let whole = adapter(&mut rng(1));
    assert!(open(UpdateKind::Lora, &whole, &parameters).is_err(), "no configuration");
}

#[test]
fn an_adapter_of_a_directory_is_the_stream() {
    let parameters = model(false);
    let push = adapter(&mut rng(2));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("adapter_config.json"), CONFIG).unwrap();
    write_safetensors(&dir.path().join("adapter_model.safetensors"), &push);
    let open = || {
        let header = UpdateHeader { source: Source::Directory(".".into()), ..UpdateHeader::new(UpdateKind::Lora) };
        declare(header, &[], &parameters, &Sources::new(Some(dir.path().into())))
    };
    let received = staged(open().unwrap()).finish().unwrap();
    let mut receiver = staged(declare(with_config(), &push, &parameters, &Sources::default()).unwrap());
    push.iter().enumerate().for_each(|(i, sent)| _ = receiver.write(i as u32, 0, &sent.bytes).unwrap());
    assert_eq!(received.digest, receiver.finish().unwrap().digest);
    check(received, &push, "directory");
    std::fs::write(dir.path().join("adapter_config.json"), " ".repeat((1 << 20) + 1)).unwrap();
    refused(open(), "source.directory", &["adapter_config.json has more than"]);
}
