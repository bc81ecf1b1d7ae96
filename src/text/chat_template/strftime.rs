//! The part of C's `strftime` that chat templates use, in UTC.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// Formats the time `seconds` after 1970-01-01 as `format` says. The error names a conversion that is not supported.
pub fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let (year, month, day_of_month) = civil(day);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[((day + 3) % 7) as usize]; // 1970 began on a Thursday
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{month:02}"),
            Some('B') => out += month_name,
            Some('b' | 'h') => out += &month_name[..3],
            Some('d') => out += &format!("{day_of_month:02}"),
            Some('e') => out += &format!("{day_of_month:2}"),
            Some('A') => out += day_name,
            Some('a') => out += &day_name[..3],
            Some('H') => out += &format!("{hour:02}"),
            Some('I') => out += &format!("{:02}", (hour + 11) % 12 + 1),
            Some('p') => out += if hour < 12 { "AM" } else { "PM" },
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{:02}", second % 60),
            Some('F') => out += &format!("{year}-{month:02}-{day_of_month:02}"),
            Some('T') => out += &format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => out += "UTC",
            Some('z') => out += "+0000",
            Some('%') => out.push('%'),
            other => {
                return Err(format!("strftime_now: %{} is not supported", other.map_or(String::new(), String::from)));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of the month of the day number `day`, counted from 1970-01-01. (Hinnant, "chrono-compatible
/// low-level date algorithms": years begin in March, so that the leap day is their last.)
fn civil(day: u64) -> (u64, u64, u64) {
    let z = day + 719_468; // days since 0000-03-01
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day_of_month)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn known_times() {
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %y %e %I %p %F %T %Z %z %%";
        let at = |seconds| strftime(all, seconds).unwrap();
        assert_eq!(at(0), "1970-01-01 00:00:00 Thu Thursday Jan January 70  1 12 AM 1970-01-01 00:00:00 UTC +0000 %");
        let leap = "2024-02-29 23:59:59 Thu Thursday Feb February 24 29 11 PM 2024-02-29 23:59:59 UTC +0000 %";
        assert_eq!(at(1_709_251_199), leap);
        let next = "2024-03-01 00:00:00 Fri Friday Mar March 24  1 12 AM 2024-03-01 00:00:00 UTC +0000 %";
        assert_eq!(at(1_709_251_200), next);
        assert_eq!(strftime("%d %b %Y", 4_102_444_800).unwrap(), "01 Jan 2100");
        assert_eq!(strftime("%Q", 0).unwrap_err(), "strftime_now: %Q is not supported");
        assert!(strftime("%", 0).is_err());
    }
}
