//! The time in which a certificate is valid, read from its DER. The TLS library checks other people's certificates, and
//! does not say when our own ends.

const SEQUENCE: u8 = 0x30;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// Tag of the version, which old certificates leave out.
const VERSION: u8 = 0xa0;

/// The first and the last second in which the certificate is valid, since 1970; None if it is no certificate.
pub(super) fn validity(certificate: &[u8]) -> Option<(i64, i64)> {
    let mut outer = content(&mut &*certificate, SEQUENCE)?;
    let mut fields = content(&mut outer, SEQUENCE)?;
    if *fields.first()? == VERSION {
        element(&mut fields)?;
    }
    // Serial number, algorithm, issuer.
    for _ in 0..3 {
        element(&mut fields)?;
    }
    let mut dates = content(&mut fields, SEQUENCE)?;
    Some((time(element(&mut dates)?)?, time(element(&mut dates)?)?))
}

/// Takes the next element: its tag and its content.
fn element<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&[tag, first], mut rest) = bytes.split_first_chunk()?;
    let length = match first {
        short @ 0..=0x7f => usize::from(short),
        // Four bytes of length are more than any certificate has.
        long @ 0x81..=0x84 => {
            let (length, after) = rest.split_at_checked(usize::from(long - 0x80))?;
            rest = after;
            length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
        }
        _ => return None,
    };
    let (content, after) = rest.split_at_checked(length)?;
    *bytes = after;
    Some((tag, content))
}

fn content<'a>(bytes: &mut &'a [u8], wanted: u8) -> Option<&'a [u8]> {
    element(bytes).filter(|(tag, _)| *tag == wanted).map(|(_, content)| content)
}

/// `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`, in seconds since 1970.
fn time((tag, text): (u8, &[u8])) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let (year, rest) = digits.split_at_checked(if tag == GENERALIZED_TIME { 4 } else { 2 })?;
    let year = match tag {
        UTC_TIME => number(year)? + if number(year)? < 50 { 2000 } else { 1900 },
        GENERALIZED_TIME => number(year)?,
        _ => return None,
    };
    let parts: Vec<i64> = rest.chunks(2).map(number).collect::<Option<_>>()?;
    let [month, day, hour, minute, second] = parts[..] else { return None };
    Some(((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second)
}

fn number(digits: &[u8]) -> Option<i64> {
    std::str::from_utf8(digits).ok().filter(|_| digits.iter().all(u8::is_ascii_digit))?.parse().ok()
}

/// Days from 1970 to a date of the Gregorian calendar. The year is counted from March, so that the leap day is its
/// last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // Days from 1 March of year 0 to 1 January 1970.
    const EPOCH: i64 = 719_468;
    year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1 - EPOCH
}

#[cfg(test)]
mod tests {
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    #[test]
    fn dates_are_read() {
        let utc = |text: &str| time((UTC_TIME, text.as_bytes()));
        let general = |text: &str| time((GENERALIZED_TIME, text.as_bytes()));
        assert_eq!(utc("700101000000Z"), Some(0));
        assert_eq!(utc("240229235959Z"), Some(1_709_251_199));
        assert_eq!(general("20240301000000Z"), Some(1_709_251_200));
        assert_eq!(general("20501231120000Z"), Some(2_556_100_800));
        assert_eq!(utc("491231000000Z"), general("20491231000000Z"));
        assert_eq!(utc("500101000000Z"), general("19500101000000Z"));
        for wrong in ["", "Z", "2402292359Z", "24022923595aZ", "240229235959", "+40229235959Z", "\u{e9}40229235959Z"] {
            assert_eq!(utc(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_certificate_says_when_it_is_valid_and_a_damaged_one_does_no_harm() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2001, 2, 3);
        params.not_after = rcgen::date_time_ymd(2055, 6, 7);
        let certificate = params.self_signed(&key).unwrap();
        let der = certificate.der();
        assert_eq!(validity(der), Some((981_158_400, 2_695_939_200)));
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..20_000 {
            let mut damaged = der[..rng.random_range(0..=der.len())].to_vec();
            for _ in 0..rng.random_range(0..4) {
                if !damaged.is_empty() {
                    let at = rng.random_range(0..damaged.len());
                    damaged[at] = rng.random();
                }
            }
            let _ = validity(&damaged);
        }
    }
}
