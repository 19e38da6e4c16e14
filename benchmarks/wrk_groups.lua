-- Rollout-shaped completions: 256 prompts of NTOK token ids that share their first 48, each asked 8 times in a row.
local count = tonumber(os.getenv("NTOK"))
local model = os.getenv("MODEL")
math.randomseed(11)
local bodies = {}
for prompt = 1, 256 do
  local ids = {}
  for i = 1, count do ids[i] = i <= 48 and i or math.random(3, 150000) end
  bodies[prompt] = string.format(
    '{"model":"%s","prompt":[%s],"max_tokens":16,"temperature":1.0,"top_p":1.0,"n":1,"return_token_ids":true,"logprobs":0,"seed":%d}',
    model, table.concat(ids, ","), prompt)
end
local asked = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
function request()
  local body = bodies[math.floor(asked / 8) % 256 + 1]
  asked = asked + 1
  return wrk.format("POST", "/v1/completions", nil, body)
end
