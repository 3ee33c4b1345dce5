// Keys under which torch's symmetric memory exchanges handles through a store, renamed so that they agree between ranks.
//
// torch's keys are "<exchange>/<number>/<rank>": "CUDASymmetricMemory/7/0". The number counts the exchanges that the process has
// made since its start, over all groups. A rank that has made more of them than another, for example in a group of its own, looks
// for keys that the other never writes. All ranks make the same exchanges within one rendezvous, so the order in which a
// rank uses new numbers there is the same on all of them.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace transformer_plugin::distributed {

// torch's numbers of each exchange, in the order in which this rank has used them in one rendezvous.
using ExchangeNumbers = std::map<std::string, std::vector<std::string>>;

// The key with the place of its number in `numbers` instead of the number, which is appended there if it is new:
// "CUDASymmetricMemory/7/0" becomes "CUDASymmetricMemory/0/0". Keys of another form stay as they are.
inline std::string rendezvous_key(const std::string& key, ExchangeNumbers& numbers) {
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  };
  const size_t second = key.rfind('/');
  if (second == std::string::npos || second == 0) return key;
  const size_t first = key.rfind('/', second - 1);
  if (first == std::string::npos) return key;
  const std::string exchange = key.substr(0, first);
  const std::string number = key.substr(first + 1, second - first - 1);
  const std::string rank = key.substr(second + 1);
  if (!is_number(number) || !is_number(rank)) return key;
  std::vector<std::string>& used = numbers[exchange];
  const auto place = std::find(used.begin(), used.end(), number) - used.begin();
  if (place == static_cast<std::ptrdiff_t>(used.size())) used.push_back(number);
  return exchange + "/" + std::to_string(place) + "/" + rank;
}

}  // namespace transformer_plugin::distributed
